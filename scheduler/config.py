"""The scheduler's options. Values are checked where options enter (`worker.config`)."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum


class SchedulerPolicy(Enum):
    DEFAULT = "default"
    CHUNKED_PREFILL = "chunked_prefill"


class PreemptionMode(Enum):
    RECOMPUTE = "recompute"
    SWAP = "swap"
    AUTO = "auto"


class QueuePolicy(Enum):
    FCFS = "fcfs"
    PRIORITY = "priority"
    FAIR = "fair"


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """Sizes are counts of tokens or sequences; 0 switches an optional limit off.

    `target_itl_ms`: prompt tokens are held down so that running answers get a token about that often (0: off).

    `priority_aging_s`: a request is worth one priority level more for every so many seconds that it is older.
    `tenant_weights`: shares under `fair`; a tenant that is not named weighs 1.
    """

    max_num_batched_tokens: int
    max_num_seqs: int
    max_model_len: int
    policy: SchedulerPolicy = SchedulerPolicy.CHUNKED_PREFILL
    preemption_mode: PreemptionMode = PreemptionMode.RECOMPUTE
    queue_policy: QueuePolicy = QueuePolicy.FCFS
    chunk_alignment: int = 1
    max_num_partial_prefills: int = 0
    long_prefill_threshold: int = 0
    min_prefill_tokens: int = 0
    target_itl_ms: float = 0.0
    priority_aging_s: float = 60.0
    tenant_weights: Mapping[str, float] = field(default_factory=dict)
    step_record_capacity: int = 4096
