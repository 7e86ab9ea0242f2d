"""Sequences and sequence groups: what one request is to the scheduler.

Owns token ids, counts and status of each sequence. Knows neither queues, nor blocks, nor time.
"""

from dataclasses import dataclass, field
from enum import Enum

from kv_cache import BlockKey


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
    `prefill_end` is how far the last admission computes in chunks; beyond it one token a step. `epoch` counts the
    times that the cache of this sequence was thrown away. `block_keys` names the full blocks of its known tokens.
    """

    seq_id: int
    index: int
    token_ids: list[int]
    num_prompt_tokens: int
    status: SequenceStatus = SequenceStatus.WAITING
    num_computed_tokens: int = 0
    num_in_flight_tokens: int = 0
    num_pending_samples: int = 0
    num_steps_in_flight: int = 0
    prefill_end: int = 0
    epoch: int = 0
    block_keys: list[BlockKey] = field(default_factory=list)
    num_published_blocks: int = 0

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
        self.num_published_blocks = 0
        self.epoch += 1
        return num_discarded

    def start_from(self, parent: "Sequence") -> None:
        """Take over the parent's tokens, all of whose cache this sequence now shares."""
        self.token_ids = parent.token_ids.copy()
        self.num_computed_tokens = parent.num_computed_tokens
        self.prefill_end = parent.prefill_end
        self.block_keys = parent.block_keys.copy()
        self.num_published_blocks = parent.num_published_blocks


#: (policy key, arrival number): the one order that waiting, recomputed and swapped groups share
OrderKey = tuple[float, int]


@dataclass(slots=True, eq=False)
class SequenceGroup:
    """One request: a prompt and its sequences, admitted, preempted and resumed as a unit.

    `live` holds the unfinished sequences that have a cache of their own, or are to get one: before the first token
    that is the first sequence alone, which computes the prompt for all (`is_forked` is then False).
    `num_tokens_at_resume` is the known length when it last came back; None if it was never preempted.
    `num_cached_tokens` is what the prefix cache gave of the prompt; `num_findable_tokens` what was published of it
    when it was last thrown away. `num_steps_passed_over` counts the steps since its last chunk in which shorter
    prompts went before this one. `waits_for` is the more urgent group that took its place: it comes in first.
    """

    request_id: str
    sequences: list[Sequence]
    stop_rules: StopRules
    order: OrderKey
    arrival_s: float
    priority: int = 0
    tenant: str = ""
    is_beam: bool = False
    live: list[Sequence] = field(default_factory=list)
    is_forked: bool = True
    num_cached_tokens: int = 0
    num_findable_tokens: int = 0
    num_preemptions: int = 0
    num_steps_passed_over: int = 0
    num_tokens_at_resume: int | None = None
    waits_for: "SequenceGroup | None" = None

    @property
    def num_seqs(self) -> int:
        """Sequence slots that the group takes: those of its siblings from the start, those of all beams to the end."""
        return len(self.live) if self.is_forked and not self.is_beam else len(self.sequences)

    @property
    def is_finished(self) -> bool:
        return not self.live

    @property
    def is_in_flight(self) -> bool:
        """Whether a step that has not ended reads or writes its blocks."""
        return any(seq.num_steps_in_flight for seq in self.sequences)

    @property
    def has_output(self) -> bool:
        return any(seq.num_output_tokens for seq in self.live)

    @property
    def num_uncomputed_tokens(self) -> int:
        """Tokens that no step has taken yet, counted once for each sequence that has to compute them."""
        return sum(seq.num_uncomputed_tokens for seq in self.live)

    @property
    def is_prefilling(self) -> bool:
        """Whether a sequence is mid-way through tokens that are computed in chunks."""
        if len(self.live) == 1:
            seq = self.live[0]
            return seq.num_computed_tokens + seq.num_in_flight_tokens < seq.prefill_end
        return any(seq.num_scheduled_tokens < seq.prefill_end for seq in self.live)

    def urgent_before(self) -> "SequenceGroup | None":
        """The group that took this one's place and is not in yet."""
        urgent = self.waits_for
        if urgent is not None and (urgent.is_finished or urgent.live[0].status is SequenceStatus.RUNNING):
            urgent = self.waits_for = None
        return urgent

    def set_status(self, status: SequenceStatus) -> None:
        """Give every unfinished sequence the status."""
        for seq in self.sequences:
            if not seq.status.is_finished:
                seq.status = status
