"""Step records: what each step did and why, as plain numbers and ids, kept in a bounded ring.

The scheduler writes them; metrics, explanations and replay read them.
"""

from collections import deque
from dataclasses import dataclass, field


@dataclass(slots=True)
class ChunkRecord:
    """One prefill chunk: tokens [start, end) of a request's known tokens."""

    request_id: str
    seq_id: int
    start: int
    end: int


@dataclass(slots=True)
class PreemptionRecord:
    """`victim` lost its blocks (mode "recompute") or had them moved to the host ("swap") so that `beneficiary` could go on."""

    victim: str
    mode: str
    reason: str
    beneficiary: str
    num_blocks: int
    num_discarded_tokens: int


@dataclass(slots=True)
class StepRecord:
    """One step. `duration_s` is filled in by `update`; queue lengths and blocks are read at the end of `schedule`.

    `waiting_reason` and `swapped_reason` say why the head of each queue was not admitted (None: queue empty),
    `waiting_behind` and `swapped_behind` name the request that stood in its way, where there is one.
    """

    step_id: int
    time_s: float
    max_num_batched_tokens: int
    num_batched_tokens: int = 0
    num_prefill_tokens: int = 0
    num_decodes: int = 0
    prefill_chunks: list[ChunkRecord] = field(default_factory=list)
    decode_request_ids: list[str] = field(default_factory=list)
    admitted: list[str] = field(default_factory=list)
    resumed: list[str] = field(default_factory=list)
    preemptions: list[PreemptionRecord] = field(default_factory=list)
    ended: list[str] = field(default_factory=list)
    num_blocks_swapped_out: int = 0
    num_blocks_swapped_in: int = 0
    num_blocks_copied: int = 0
    num_waiting: int = 0
    num_running: int = 0
    num_swapped: int = 0
    num_device_blocks_used: int = 0
    num_host_blocks_used: int = 0
    waiting_reason: str | None = None
    waiting_behind: str | None = None
    swapped_reason: str | None = None
    swapped_behind: str | None = None
    duration_s: float | None = None


class StepRecordRing:
    """The newest `capacity` records, oldest first. `drain_since` lets one reader follow without copying the ring."""

    def __init__(self, capacity: int) -> None:
        self._records: deque[StepRecord] = deque(maxlen=capacity)

    def append(self, record: StepRecord) -> None:
        self._records.append(record)

    def since(self, step_id: int) -> list[StepRecord]:
        """The records whose step id is greater than `step_id`, oldest first."""
        found: list[StepRecord] = []
        for record in reversed(self._records):
            if record.step_id <= step_id:
                break
            found.append(record)
        found.reverse()
        return found

    def __len__(self) -> int:
        return len(self._records)
