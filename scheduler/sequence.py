"""Sequences and sequence groups: what one request is to the scheduler.

Owns token ids, counts and status of each sequence. Knows neither queues, nor blocks, nor time.
"""

from dataclasses import dataclass, field
from enum import Enum


class SequenceStatus(Enum):
    WAITING = "waiting"
    RUNNING = "running"
    SWAPPED = "swapped"
    FINISHED_STOPPED = "stop"
    FINISHED_LENGTH_CAPPED = "length"
    FINISHED_ABORTED = "abort"
    FINISHED_IGNORED = "error"

    @property
    def is_finished(self) -> bool:
        return self not in _UNFINISHED


_UNFINISHED = frozenset({SequenceStatus.WAITING, SequenceStatus.RUNNING, SequenceStatus.SWAPPED})


@dataclass(frozen=True, slots=True)
class StopRules:
    """When a sequence ends by itself. `stop_token_ids` holds the model's EOS ids unless they are ignored."""

    max_tokens: int
    min_tokens: int = 0
    stop_token_ids: frozenset[int] = frozenset()


@dataclass(slots=True, eq=False)
class Sequence:
    """One answer in the making. `token_ids` is the prompt followed by the output.

    `num_computed_tokens` counts tokens whose keys and values are in the cache and known to be there;
    `num_in_flight_tokens` those scheduled in steps that have not ended. `num_pending_samples` counts the
    tokens that those steps will append.
    """

    seq_id: int
    index: int
    token_ids: list[int]
    num_prompt_tokens: int
    status: SequenceStatus = SequenceStatus.WAITING
    num_computed_tokens: int = 0
    num_in_flight_tokens: int = 0
    num_pending_samples: int = 0

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens


@dataclass(slots=True, eq=False)
class SequenceGroup:
    """One request: a prompt and its sequences, admitted, preempted and resumed as a unit.

    `resume_num_tokens` is the known length at the last resume, for the rule that a victim should have
    advanced since it came back; None while the group was never preempted.
    """

    request_id: str
    sequences: list[Sequence]
    stop_rules: StopRules
    arrival_s: float
    arrival_index: int
    priority: int = 0
    num_in_flight_steps: int = 0
    num_preemptions: int = 0
    resume_num_tokens: int | None = None
    error: str | None = None
    finished_indices: set[int] = field(default_factory=set)
