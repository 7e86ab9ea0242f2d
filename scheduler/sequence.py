"""Sequences and sequence groups: what one request is to the scheduler.

Owns token ids, counts and status of each sequence. Knows neither queues, nor blocks, nor time.
"""

from dataclasses import dataclass
from enum import Enum


class SequenceStatus(Enum):
    """Where a sequence stands. The values of the finished ones are the finish reasons that clients read."""

    WAITING = "waiting"
    RUNNING = "running"
    SWAPPED = "swapped"
    FINISHED_STOPPED = "stop"
    FINISHED_LENGTH_CAPPED = "length"
    FINISHED_ABORTED = "abort"
    FINISHED_IGNORED = "error"

    def __init__(self, value: str) -> None:
        # Kept with the member: it is asked for every sequence in every step.
        self.is_finished = value not in ("waiting", "running", "swapped")


@dataclass(frozen=True, slots=True)
class StopRules:
    """When a sequence ends by itself.

    `stop_token_ids` holds the model's EOS ids, unless the request ignores them. At `max_num_tokens` (prompt and
    output together) it ends with "length", as at `max_tokens` of output.
    """

    max_tokens: int
    max_num_tokens: int
    min_tokens: int = 0
    stop_token_ids: frozenset[int] = frozenset()


@dataclass(slots=True, eq=False)
class Sequence:
    """One answer in the making. `token_ids` is the prompt followed by the output.

    `num_computed_tokens` counts tokens whose keys and values are known to be in the cache, `num_in_flight_tokens`
    those scheduled in steps that have not ended, `num_pending_samples` the tokens that those steps will append.
    `epoch` counts the times that the cache of this sequence was thrown away.
    """

    seq_id: int
    index: int
    token_ids: list[int]
    num_prompt_tokens: int
    status: SequenceStatus = SequenceStatus.WAITING
    num_computed_tokens: int = 0
    num_in_flight_tokens: int = 0
    num_pending_samples: int = 0
    epoch: int = 0

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def num_scheduled_tokens(self) -> int:
        """Tokens that are in the cache or will be when the steps in flight have ended."""
        return self.num_computed_tokens + self.num_in_flight_tokens

    @property
    def num_uncomputed_tokens(self) -> int:
        """Known and pending tokens that no step has taken yet."""
        return len(self.token_ids) + self.num_pending_samples - self.num_computed_tokens - self.num_in_flight_tokens

    def discard_cache(self) -> int:
        """Forget all cached tokens, those in flight included; return how many they were."""
        num_discarded = self.num_scheduled_tokens
        self.num_computed_tokens = 0
        self.num_in_flight_tokens = 0
        self.epoch += 1
        return num_discarded


#: (policy key, arrival number): the one order that waiting, recomputed and swapped groups share
OrderKey = tuple[float, int]


@dataclass(slots=True, eq=False)
class SequenceGroup:
    """One request: a prompt and its sequences, admitted, preempted and resumed as a unit.

    `prefill_end` is the known length at the last admission: up to there tokens are computed in chunks, beyond it
    one a step. `num_tokens_at_resume` is the known length when it last came back; None if it was never preempted.
    `num_steps_passed_over` counts the steps in a row in which shorter prompts went before this one.
    """

    request_id: str
    sequences: list[Sequence]
    stop_rules: StopRules
    order: OrderKey
    arrival_s: float
    prefill_end: int = 0
    num_steps_in_flight: int = 0
    num_preemptions: int = 0
    num_steps_passed_over: int = 0
    num_tokens_at_resume: int | None = None

    @property
    def num_seqs(self) -> int:
        """Sequence slots that the group takes."""
        return len(self.sequences)

    @property
    def is_finished(self) -> bool:
        return all(seq.status.is_finished for seq in self.sequences)

    @property
    def num_uncomputed_tokens(self) -> int:
        return sum(seq.num_uncomputed_tokens for seq in self.sequences)

    @property
    def is_prefilling(self) -> bool:
        return self.sequences[0].num_scheduled_tokens < self.prefill_end

    def set_status(self, status: SequenceStatus) -> None:
        """Give every unfinished sequence the status."""
        for seq in self.sequences:
            if not seq.status.is_finished:
                seq.status = status
