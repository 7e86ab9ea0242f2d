"""`StepSampler`: from a step's logits to what each open request takes of them: tokens, beams, or that it cannot go on.

Knows no scheduler and no step but this one; it ends nobody.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from kv_cache import BlockKey
from scheduler import BeamChoices, ScheduledChunk
from worker.open_request import OpenRequest
from worker.sampler import NO_TOKEN, Sampler, SampleRow, has_no_best
from worker.types import TokenEvent


@dataclass(slots=True)
class StepSamples:
    """`token_ids` and `block_keys` (of the blocks that they complete) by sequence id, `beams` by request id (empty
    choices: the search is over). `broken`: requests that cannot go on, for their grammar or for want of numbers."""

    token_ids: dict[int, list[int]] = field(default_factory=dict)
    block_keys: dict[int, list[BlockKey]] = field(default_factory=dict)
    events: list[TokenEvent] = field(default_factory=list)
    beams: dict[str, BeamChoices] = field(default_factory=dict)
    broken: set[str] = field(default_factory=set)


class StepSampler:
    def __init__(self, sampler: Sampler, vocab_size: int, block_size: int) -> None:
        self._sampler = sampler
        self._vocab_size = vocab_size
        self._block_size = block_size

    def sample(
        self, requests: Mapping[str, OpenRequest], logits: torch.Tensor, chunks: list[ScheduledChunk]
    ) -> StepSamples:
        """`logits` [len(chunks), vocabulary]: a row for each chunk that samples. Each request takes its own."""
        step = StepSamples()
        self._take_tokens(step, requests, logits, chunks)
        self._advance_beams(step, requests, logits, chunks)
        return step

    def _take_tokens(
        self, step: StepSamples, requests: Mapping[str, OpenRequest], logits: torch.Tensor, chunks: list[ScheduledChunk]
    ) -> None:
        rows: list[SampleRow] = []
        owners: list[OpenRequest] = []
        for logits_row, chunk in enumerate(chunks):
            request = requests[chunk.request_id]
            if request.beam is None:
                own_rows = request.sample_rows(logits_row, chunk)
                rows += own_rows
                owners += [request] * len(own_rows)
        for request, row, token in zip(owners, rows, self._sampler.sample(logits, rows), strict=True):
            if token.token_id == NO_TOKEN or request.failure is not None:
                step.broken.add(request.group.request_id)
                continue
            seq_id = request.seq_id_of(row.sample_index)
            step.token_ids[seq_id] = [token.token_id]
            if keys := request.new_block_keys(row, token.token_id, self._block_size):
                step.block_keys[seq_id] = keys
            step.events.append(request.take(row, token))
            if request.failure is not None:
                step.broken.add(request.group.request_id)

    def _advance_beams(
        self, step: StepSamples, requests: Mapping[str, OpenRequest], logits: torch.Tensor, chunks: list[ScheduledChunk]
    ) -> None:
        rows: dict[str, list[int]] = {}
        for logits_row, chunk in enumerate(chunks):
            if requests[chunk.request_id].beam is not None:
                rows.setdefault(chunk.request_id, []).append(logits_row)
        for request_id, places in rows.items():
            own_logits = logits[places, : self._vocab_size]
            if bool(has_no_best(own_logits.amax(dim=-1)).any()):
                step.broken.add(request_id)
            else:
                step.beams[request_id] = requests[request_id].advance_beams(own_logits)
