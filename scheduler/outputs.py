"""What one call of `schedule` decided, in ids and plain numbers: it could cross a process."""

from dataclasses import dataclass, field


@dataclass(slots=True)
class ScheduledChunk:
    """One row of the flat batch: `len(token_ids)` known tokens of a sequence from position `start` on.

    `block_table` is the manager's own list: read it before the next `schedule`, never change it.
    Rows with `do_sample` complete the known tokens; `sample_seq_ids` and `sample_indices` name the sequences
    that take a token from this row (one, or all n of a group at its first token).
    """

    request_id: str
    seq_id: int
    start: int
    token_ids: list[int]
    block_table: list[int]
    is_prefill: bool
    do_sample: bool
    sample_seq_ids: list[int]
    sample_indices: list[int]

    @property
    def token_chunk_size(self) -> int:
        return len(self.token_ids)


@dataclass(slots=True)
class SchedulerOutputs:
    """One step. The tensor pool applies `blocks_to_swap_out`, then `_in`, then `_copy`, before the forward pass.

    Pairs are (source, destination): (device, host), (host, device), (device, device).
    """

    step_id: int
    chunks: list[ScheduledChunk] = field(default_factory=list)
    blocks_to_swap_out: list[tuple[int, int]] = field(default_factory=list)
    blocks_to_swap_in: list[tuple[int, int]] = field(default_factory=list)
    blocks_to_copy: list[tuple[int, int]] = field(default_factory=list)
    num_batched_tokens: int = 0
    num_prefill_tokens: int = 0
    #: request ids that ended inside `schedule` (cannot grow, can never resume), with the reason of their end
    ended_request_ids: list[str] = field(default_factory=list)

    @property
    def is_empty(self) -> bool:
        return not self.chunks and not self.blocks_to_swap_out
