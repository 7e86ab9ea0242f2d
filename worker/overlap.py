"""Which steps may still run while the next one is planned, and what is kept of one that does.

The order of one turn of the engine, with step k on the device: plan k + 1 and prepare its tensors; sample k; move the
blocks and run the pass of k + 1; only then wait for k's tokens and settle it. So the device has k + 1 to do while the
host settles k and plans on, and yet k is sampled when everything before it is known. Hence a row needs its last token
on the host for nothing but its own planning:

- Grammars, penalties, logit bias, `min_tokens`, seeds and log-probabilities belong to sampling: nothing to wait for.
- Names of full blocks and what is told of an answer follow when the step is settled, one step later than without.
- A row that had already ended (a stop token, an abort, `finish`) is not sampled: what its step computed is dropped.

Three kinds of rows decide more than a token, and their step is settled before the next one is planned: beams (their
parents are chosen on the host), first tokens of several samples (siblings part), and prompts whose log-probabilities
are wanted (they are read from the pass that ran last).
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch

from scheduler import ScheduledChunk, SchedulerOutputs
from scheduler.records import StepRecord
from worker.device import Event
from worker.open_request import OpenRequest


@dataclass(slots=True, eq=False)
class RunningStep:
    """A step that was launched and is not settled. `logits` [sampling chunks, vocabulary] hold until the next pass.
    `ended`: the pass has, for steps that sample nothing, or nothing any more."""

    outputs: SchedulerOutputs
    record: StepRecord
    logits: torch.Tensor
    ended: Event


def may_plan_past(chunks: Iterable[ScheduledChunk], requests: Mapping[str, OpenRequest]) -> bool:
    """Whether the next step can be planned before the step with these chunks has ended."""
    for chunk in chunks:
        request = requests.get(chunk.request_id)
        if request is None:
            continue  # it has ended
        if request.beam is not None or (chunk.do_sample and chunk.sample_indices is not None):
            return False
        if chunk.is_prefill and request.scores is not None:
            return False
    return True


def rows_that_go_on(
    chunks: Iterable[ScheduledChunk], requests: Mapping[str, OpenRequest]
) -> list[tuple[int, ScheduledChunk]]:
    """(row of logits, chunk) of those sampling chunks whose sequence has not ended since they were planned. A request
    id may be used again meanwhile; a sequence id is not."""
    rows: list[tuple[int, ScheduledChunk]] = []
    for row, chunk in enumerate(chunks):
        request = requests.get(chunk.request_id)
        if request is not None and request.goes_on(chunk.seq_id):
            rows.append((row, chunk))
    return rows
