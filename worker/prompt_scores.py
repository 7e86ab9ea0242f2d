"""Log-probabilities of prompts: what a request wants of its prompt, and how it comes out of the rows of a step.

Owns the slices in which rows are scored, so that a chunk of any size needs a bounded amount of memory. A row is scored
once: what is computed again after a preemption is passed over. Knows neither sampling nor how scores are sent.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import torch

from scheduler import ScheduledChunk
from worker.sampled_rows import floored
from worker.sampler import has_no_best
from worker.types import PromptTokenLogprobs

#: logits in memory at once, in elements: 64 MiB of float32
NUM_LOGITS_AT_ONCE = 1 << 24


@dataclass(slots=True, eq=False)
class PromptScores:
    """Of one prompt, `num_alternatives` beside each token. `scored[i]` is of token i + 1: nothing foretells the first.
    """

    token_ids: list[int]
    num_alternatives: int
    scored: list[PromptTokenLogprobs] = field(default_factory=list)

    def places_in(self, chunk: ScheduledChunk) -> range:
        """Places in the chunk of the rows that foretell tokens which are not scored yet."""
        first = len(self.scored) - chunk.start
        return range(max(first, 0), min(len(chunk.token_ids), len(self.token_ids) - 1 - chunk.start))


@dataclass(slots=True)
class _Row:
    """`place`: among the rows of the step. `token_id`: the one that came next."""

    request_id: str
    place: int
    token_id: int
    scores: PromptScores


def score_prompts(
    chunks: Iterable[ScheduledChunk],
    scores_of: Callable[[ScheduledChunk], PromptScores | None],
    logits_of: Callable[[list[int]], torch.Tensor],
    vocab_size: int,
) -> set[str]:
    """Extend the scores of the prompts in a step; returns the requests for which the model gave no numbers.

    scores_of: by chunk, None where none are wanted. logits_of: places among the step's rows → float32 logits
    [places, at least vocab_size].
    """
    rows: list[_Row] = []
    first_place = 0
    for chunk in chunks:
        scores = scores_of(chunk) if chunk.is_prefill else None
        if scores is not None:
            rows += [
                _Row(chunk.request_id, first_place + place, scores.token_ids[chunk.start + place + 1], scores)
                for place in scores.places_in(chunk)
            ]
        first_place += len(chunk.token_ids)
    broken: set[str] = set()
    num_rows_at_once = max(1, NUM_LOGITS_AT_ONCE // vocab_size)
    for start in range(0, len(rows), num_rows_at_once):
        part = rows[start : start + num_rows_at_once]
        broken |= _score(part, logits_of([row.place for row in part])[:, :vocab_size])
    return broken


def _score(rows: list[_Row], logits: torch.Tensor) -> set[str]:
    normalizer = logits.logsumexp(dim=-1, keepdim=True)
    token_ids = torch.tensor([[row.token_id] for row in rows], device=logits.device)
    own = logits.gather(1, token_ids)
    ranks = (logits > own).sum(dim=-1).add_(1).tolist()
    num_alternatives = max(row.scores.num_alternatives for row in rows)
    top = logits.topk(min(num_alternatives, logits.shape[1]), dim=-1)
    top_ids, top_values = top.indices.tolist(), (top.values - normalizer).tolist()
    logprobs = (own - normalizer).squeeze(1).tolist()
    for place, row in enumerate(rows):
        best_first = sorted(zip(top_ids[place], top_values[place], strict=True), key=lambda pair: (-pair[1], pair[0]))
        alternatives = [(token_id, floored(value)) for token_id, value in best_first[: row.scores.num_alternatives]]
        row.scores.scored.append((floored(logprobs[place]), ranks[place], alternatives))
    is_broken = has_no_best(logits.amax(dim=-1)).tolist()
    return {row.request_id for place, row in enumerate(rows) if is_broken[place]}
