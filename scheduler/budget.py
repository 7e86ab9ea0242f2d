"""How many tokens and sequences one step may still take."""


class SchedulingBudget:
    """Tokens and sequence slots of one step. `can_admit` is the one gate for whoever wants to come in.

    Slots are taken by every sequence that holds blocks, whether or not it runs in this step: a prompt that is
    mid-way will decode, and no decode may then find the slots full.
    """

    __slots__ = ("max_num_batched_tokens", "max_num_seqs", "num_batched_tokens", "num_seqs")

    def __init__(self, max_num_batched_tokens: int, max_num_seqs: int) -> None:
        self.max_num_batched_tokens = max_num_batched_tokens
        self.max_num_seqs = max_num_seqs
        self.num_batched_tokens = 0
        self.num_seqs = 0

    @property
    def remaining_tokens(self) -> int:
        return self.max_num_batched_tokens - self.num_batched_tokens

    def can_admit(self, num_tokens: int, num_seqs: int) -> bool:
        return num_tokens <= self.remaining_tokens and self.num_seqs + num_seqs <= self.max_num_seqs

    def add_tokens(self, num_tokens: int) -> None:
        self.num_batched_tokens += num_tokens
        assert self.num_batched_tokens <= self.max_num_batched_tokens

    def add_seqs(self, num_seqs: int) -> None:
        self.num_seqs += num_seqs
        assert self.num_seqs <= self.max_num_seqs
