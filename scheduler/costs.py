"""What a preemption costs: computing the cache again, or moving it to the host and back. Estimates, in seconds."""


class PreemptionCosts:
    """Rates are measured by the engine and come in as numbers; what the prefix cache gives back is learnt here."""

    def __init__(self) -> None:
        self.prefill_tokens_per_s = 1000.0
        self.swap_blocks_per_s = 1000.0
        #: of the tokens that a recomputed group lost, the share that the prefix cache still had when it came back
        self.returned_share = 0.5

    def recompute_s(self, num_tokens: int, num_findable_tokens: int) -> float:
        """Time to compute `num_tokens` again, `num_findable_tokens` of which may still be cached then."""
        return (num_tokens - num_findable_tokens * self.returned_share) / self.prefill_tokens_per_s

    def swap_s(self, num_blocks: int) -> float:
        """Time to copy the blocks out and in again."""
        return 2 * num_blocks / self.swap_blocks_per_s

    def learn(self, num_findable_tokens: int, num_found_tokens: int) -> None:
        """A recomputed group came back: how much of what could be found was."""
        if num_findable_tokens:
            share = min(num_found_tokens / num_findable_tokens, 1.0)
            self.returned_share += (share - self.returned_share) / 8
