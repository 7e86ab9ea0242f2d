"""The scheduler: which tokens of which sequences run in the next step, and why the others do not."""

from scheduler.config import PreemptionMode, SchedulerConfig, SchedulerPolicy
from scheduler.outputs import PENDING_TOKEN_ID, ScheduledChunk, SchedulerOutputs, SequenceEnd
from scheduler.scheduler import RequestTooLargeError, Scheduler
from scheduler.sequence import Sequence, SequenceGroup, SequenceStatus, StopRules

__all__ = [
    "PENDING_TOKEN_ID",
    "PreemptionMode",
    "RequestTooLargeError",
    "ScheduledChunk",
    "Scheduler",
    "SchedulerConfig",
    "SchedulerOutputs",
    "SchedulerPolicy",
    "Sequence",
    "SequenceEnd",
    "SequenceGroup",
    "SequenceStatus",
    "StopRules",
]
