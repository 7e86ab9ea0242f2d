"""Step records: what each step did and why, as plain numbers and ids, kept in a bounded ring.

The scheduler writes them; metrics, explanations and replay read them.
"""

from collections import deque
from dataclasses import dataclass, field
from enum import StrEnum


class WaitReason(StrEnum):
    """Why the head of a queue was not admitted in a step; those behind it inherit the reason."""

    TOKEN_BUDGET = "token_budget"
    SEQUENCE_SLOTS = "sequence_slots"
    BLOCKS = "blocks"
    PRIORITY = "priority"
    BEHIND_SWAPPED = "behind_swapped"
    BEHIND_RECOMPUTED = "behind_recomputed"
    PARTIAL_PREFILL_CAP = "partial_prefill_cap"
    LONG_PREFILL = "long_prefill"
    PREEMPTION = "preemption"
    PREFILLS_FIRST = "prefills_first"
    IN_FLIGHT = "in_flight"


@dataclass(slots=True)
class ChunkRecord:
    """One prefill chunk: known tokens [start, end) of a sequence. `completes`: its group decodes from then on."""

    request_id: str
    seq_id: int
    start: int
    end: int
    completes: bool = False


@dataclass(slots=True)
class PreemptionRecord:
    """`victim` lost its cache so that `beneficiary` could go on.

    mode "recompute": `num_discarded_tokens` will be computed again. mode "swap": they moved to the host.
    reason: "blocks", "priority", or "host_pool_full" for a swap that fell back to recompute. The estimates are those
    that mode `auto` compared; 0.0 where there was nothing to choose.
    """

    victim: str
    mode: str
    reason: str
    beneficiary: str
    num_blocks: int
    num_discarded_tokens: int
    recompute_estimate_s: float
    swap_estimate_s: float


@dataclass(slots=True)
class StepRecord:
    """One step. `time_s` is when it was planned or, once it is settled, when it began: when the step before it had
    ended, if it was planned while that one ran. `duration_s` is filled in by `update`, as is `is_over_target`: with a
    target for the time between tokens, running answers waited longer. `max_num_batched_tokens` is what a governor left
    of the budget. Queue lengths and blocks are those at the end of `schedule`.

    `swap_s` is how long the step waited for its blocks to be moved, filled in by whoever moves them; `governor_margin`
    what the governor keeps for noise, as a factor of the foreseen time (0.0: there is none).

    `num_blocks_queried` and `num_blocks_hit` count blocks of the groups let in: looked for and found in the prefix
    cache.

    `waiting_reason` and `swapped_reason` say why the head of each queue stayed there (None: the queue is empty);
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
    num_blocks_queried: int = 0
    num_blocks_hit: int = 0
    num_waiting: int = 0
    num_running: int = 0
    num_swapped: int = 0
    num_device_blocks_used: int = 0
    num_host_blocks_used: int = 0
    waiting_reason: WaitReason | None = None
    waiting_behind: str | None = None
    swapped_reason: WaitReason | None = None
    swapped_behind: str | None = None
    duration_s: float | None = None
    is_over_target: bool = False
    swap_s: float = 0.0
    governor_margin: float = 0.0


class StepRecordRing:
    """The newest `capacity` records, oldest first."""

    def __init__(self, capacity: int) -> None:
        self._records: deque[StepRecord] = deque(maxlen=capacity)

    def append(self, record: StepRecord) -> None:
        self._records.append(record)

    @property
    def newest(self) -> StepRecord:
        return self._records[-1]

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
