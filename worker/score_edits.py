"""Edits that a request makes to its own scores before a token is chosen: logit bias, penalties, min_tokens, a grammar.

Owns the formulas. Knows nothing of temperature, noise or other rows; it changes the one row it is given, in place.
"""

from collections import Counter
from collections.abc import Iterable, Sequence

import torch

from worker.device import open_device
from worker.types import SamplingParams


def edits_scores(params: SamplingParams, num_output_tokens: int) -> bool:
    """Whether `edit_scores` would change anything, where all tokens are allowed."""
    return bool(
        params.logit_bias
        or params.repetition_penalty != 1.0
        or params.presence_penalty
        or params.frequency_penalty
        or num_output_tokens < params.min_tokens
    )


def edit_scores(
    scores: torch.Tensor,
    params: SamplingParams,
    prompt_token_ids: Sequence[int],
    output_token_ids: Sequence[int],
    eos_token_ids: Iterable[int],
    allowed: torch.Tensor | None = None,
) -> None:
    """Change float32 `scores` [vocabulary] in place: bias first, then penalties, then the ban on early
    ends, then that on what is not `allowed` (bool [vocabulary], on the CPU; None: everything is).

    The repetition penalty sees prompt and output, presence and frequency the output only. While there are fewer
    than `min_tokens` output tokens, stop tokens cannot be chosen: those of the request, and the model's EOS unless
    the request ignores it anyway. Ids beyond the vocabulary are passed over: the edge refuses them.
    """
    if params.logit_bias:
        bias = {token_id: value for token_id, value in params.logit_bias if 0 <= token_id < len(scores)}
        ids = _ids(bias, scores)
        scores[ids] += open_device(scores.device).upload(list(bias.values()), scores.dtype)
    if params.repetition_penalty != 1.0:
        ids = _ids({*prompt_token_ids, *output_token_ids}, scores)
        seen = scores[ids]
        penalty = params.repetition_penalty
        scores[ids] = torch.where(seen > 0, seen / penalty, seen * penalty)
    if (params.presence_penalty or params.frequency_penalty) and output_token_ids:
        counts = Counter(output_token_ids)
        ids = _ids(counts, scores)
        known_counts = [count for token_id, count in counts.items() if 0 <= token_id < len(scores)]
        counted = open_device(scores.device).upload(known_counts, torch.int64)
        scores[ids] -= params.frequency_penalty * counted + params.presence_penalty
    if len(output_token_ids) < params.min_tokens:
        ending = set(params.stop_token_ids)
        if not params.ignore_eos:
            ending.update(eos_token_ids)
        if allowed is None or _leaves_something(allowed, ending):
            scores[_ids(ending, scores)] = -torch.inf
    if allowed is not None:
        scores.masked_fill_(~open_device(scores.device).send(allowed), -torch.inf)


def _leaves_something(allowed: torch.Tensor, banned: Iterable[int]) -> bool:
    """Whether a ban leaves any token: where an answer can only end, it ends."""
    rest = allowed.clone()
    rest[_ids(banned, rest)] = False
    return bool(rest.any())


def _ids(token_ids: Iterable[int], scores: torch.Tensor) -> torch.Tensor:
    known = [token_id for token_id in token_ids if 0 <= token_id < len(scores)]
    return open_device(scores.device).upload(known, torch.int64)
