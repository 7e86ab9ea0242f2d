"""`StepSampler`: from a step's logits to what each open request takes of them: tokens, beams, or that it cannot go on.

Knows no scheduler and no step but this one; it ends nobody.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import torch

from kv_cache import BlockKey
from scheduler import BeamChoices, ScheduledChunk
from worker.open_request import OpenRequest
from worker.pending_tokens import DeviceTokens
from worker.sampled_rows import NO_TOKEN, SampledRows, SampleRow
from worker.sampler import Sampler, has_no_best
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


@dataclass(slots=True, eq=False)
class LaunchedSamples:
    """A step's samples while they are drawn: each of `rows` is its owner's."""

    rows: list[SampleRow] = field(default_factory=list)
    owners: list[OpenRequest] = field(default_factory=list)
    sampled: SampledRows | None = None
    beams: dict[str, BeamChoices] = field(default_factory=dict)
    broken_beams: set[str] = field(default_factory=set)

    def on_device(self) -> DeviceTokens | None:
        """For a step that is planned before these have arrived."""
        if self.sampled is None:
            return None
        places = {
            owner.seq_id_of(row.sample_index): place
            for place, (owner, row) in enumerate(zip(self.owners, self.rows, strict=True))
        }
        return DeviceTokens(self.sampled.token_ids, places)


class StepSampler:
    def __init__(self, sampler: Sampler, vocab_size: int, block_size: int) -> None:
        self._sampler = sampler
        self._vocab_size = vocab_size
        self._block_size = block_size

    def launch(
        self, requests: Mapping[str, OpenRequest], logits: torch.Tensor, chunks: Iterable[tuple[int, ScheduledChunk]]
    ) -> LaunchedSamples:
        """`logits` [rows, vocabulary]; `chunks`: what samples, and the row of each. Each request takes its own."""
        launched = LaunchedSamples()
        beam_rows: dict[str, list[int]] = {}
        for logits_row, chunk in chunks:
            request = requests[chunk.request_id]
            if request.beam is None:
                own_rows = request.sample_rows(logits_row, chunk)
                launched.rows += own_rows
                launched.owners += [request] * len(own_rows)
            else:
                beam_rows.setdefault(chunk.request_id, []).append(logits_row)
        if launched.rows:
            launched.sampled = self._sampler.launch(logits, launched.rows)
        for request_id, places in beam_rows.items():
            self._advance_beams(launched, requests[request_id], logits[places, : self._vocab_size])
        return launched

    def collect(self, launched: LaunchedSamples) -> StepSamples:
        """Wait for the samples, and let each request take its own."""
        step = StepSamples(beams=launched.beams, broken=launched.broken_beams)
        tokens = [] if launched.sampled is None else launched.sampled.wait()
        for request, row, token in zip(launched.owners, launched.rows, tokens, strict=True):
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
        return step

    def _advance_beams(self, launched: LaunchedSamples, request: OpenRequest, logits: torch.Tensor) -> None:
        """Beams are chosen on the host, which waits for them here."""
        request_id = request.group.request_id
        if bool(has_no_best(logits.amax(dim=-1)).any()):
            launched.broken_beams.add(request_id)
        else:
            launched.beams[request_id] = request.advance_beams(logits)
