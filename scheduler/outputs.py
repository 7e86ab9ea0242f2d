"""What one call of `schedule` decided, in ids and plain numbers: it could cross a process."""

from dataclasses import dataclass, field

#: Stands in a chunk for a token that a step still in flight will sample.
PENDING_TOKEN_ID = -1


@dataclass(slots=True)
class ScheduledChunk:
    """One row of the flat batch: the known tokens `token_ids` of a sequence, from position `start` on.

    `block_table` is the manager's own list: read it before the next `schedule`, never change it. A row with
    `do_sample` completes the known tokens. `sample_indices` names the samples of the group that take a token from
    this row; None means the row's own sequence alone.
    """

    request_id: str
    seq_id: int
    start: int
    token_ids: list[int]
    block_table: list[int]
    is_prefill: bool
    do_sample: bool
    sample_indices: list[int] | None = None

    @property
    def token_chunk_size(self) -> int:
        return len(self.token_ids)


@dataclass(slots=True)
class SequenceEnd:
    """A sequence that has ended, and why: "stop", "length", "abort" or "error" (then `error` says more)."""

    request_id: str
    index: int
    finish_reason: str
    error: str | None = None


@dataclass(slots=True)
class SchedulerOutputs:
    """One step. The tensor pool applies `blocks_to_swap_out`, then `_in`, then `_copy`, before the forward pass.

    Pairs are (source, destination): (device, host), (host, device), (device, device). `ended` holds sequences that
    ended while the step was planned, since they outgrew the pool or can never fit.
    """

    step_id: int
    chunks: list[ScheduledChunk] = field(default_factory=list)
    blocks_to_swap_out: list[tuple[int, int]] = field(default_factory=list)
    blocks_to_swap_in: list[tuple[int, int]] = field(default_factory=list)
    blocks_to_copy: list[tuple[int, int]] = field(default_factory=list)
    num_batched_tokens: int = 0
    num_prefill_tokens: int = 0
    ended: list[SequenceEnd] = field(default_factory=list)

    @property
    def is_empty(self) -> bool:
        """Nothing to run and nothing to move."""
        return not self.chunks and not self.blocks_to_swap_out
