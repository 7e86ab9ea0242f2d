"""The size of a prefill chunk."""


def chunk_size(num_uncomputed_tokens: int, num_budget_tokens: int, alignment: int) -> int:
    """How many of a prompt's tokens one step takes.

    All of them where the budget allows. A chunk that the budget truncates is floored to a multiple of `alignment`,
    unless that would leave nothing: then the unaligned rest of the budget is taken.
    """
    if num_uncomputed_tokens <= num_budget_tokens:
        return num_uncomputed_tokens
    return num_budget_tokens - num_budget_tokens % alignment or num_budget_tokens
