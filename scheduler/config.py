"""The scheduler's options. Values are checked where options enter (`worker.config`)."""

from dataclasses import dataclass
from enum import Enum


class SchedulerPolicy(Enum):
    DEFAULT = "default"
    CHUNKED_PREFILL = "chunked_prefill"


class PreemptionMode(Enum):
    RECOMPUTE = "recompute"
    SWAP = "swap"
    AUTO = "auto"


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """Sizes are counts of tokens or sequences; 0 switches an optional limit off."""

    max_num_batched_tokens: int
    max_num_seqs: int
    max_model_len: int
    policy: SchedulerPolicy = SchedulerPolicy.CHUNKED_PREFILL
    preemption_mode: PreemptionMode = PreemptionMode.RECOMPUTE
    chunk_alignment: int = 1
    max_num_partial_prefills: int = 0
    long_prefill_threshold: int = 0
    min_prefill_tokens: int = 0
    step_record_capacity: int = 4096
