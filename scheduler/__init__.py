"""The scheduler: which tokens of which sequences run in the next step, and why the others do not."""

from scheduler.config import PreemptionMode, QueuePolicy, SchedulerConfig, SchedulerPolicy
from scheduler.outputs import PENDING_TOKEN_ID, ScheduledChunk, SchedulerOutputs, SequenceEnd
from scheduler.requests import Request, RequestTooLargeError
from scheduler.scheduler import BeamChoices, Scheduler
from scheduler.sequence import Sequence, SequenceGroup, SequenceStatus, StopRules

__all__ = [
    "PENDING_TOKEN_ID",
    "BeamChoices",
    "PreemptionMode",
    "QueuePolicy",
    "Request",
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
