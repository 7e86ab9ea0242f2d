"""`best_of`: which answers are returned. Knows whole answers and their log-probabilities, no requests."""

from dataclasses import replace

from deployments.answers import Delta
from deployments.protocol.responses import finite


def best_answers(wholes: list[Delta], num_candidates: int, num_choices: int) -> list[Delta]:
    """Of each prompt's `num_candidates` answers (by index, prompt after prompt) the `num_choices` with the highest
    mean log-probability, best first, with new indices. Of equals the first goes first."""
    chosen: list[Delta] = []
    for start in range(0, len(wholes), num_candidates):
        ranked = sorted(wholes[start : start + num_candidates], key=_mean_logprob, reverse=True)
        chosen += ranked[:num_choices]
    return [replace(whole, index=index) for index, whole in enumerate(chosen)]


def _mean_logprob(whole: Delta) -> float:
    """Over the tokens that count: a stop string has cut what came after it."""
    return sum(finite(entry.logprobs[0]) for entry in whole.logprobs) / max(len(whole.logprobs), 1)
