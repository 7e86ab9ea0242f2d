"""Rows of logits to token ids and log-probabilities.

Owns the order of operations of one sampled token. Knows neither sequences nor the cache; it keeps no state between
calls, and no row's settings reach another row's result.

A token is the argmax of its decision scores: the logits with the request's edits (`score_edits`), and, unless the
row is greedy, divided by the temperature, cut to the survivors of top-k, top-p and min-p (`survivors`) and shifted
by Gumbel noise (`noise`). That is a draw from the softmax of what survived. Equal scores go to the lowest token id.
Log-probabilities are the log-softmax of the raw logits: temperature, edits and cuts do not show in them.
Where a row's tokens are restricted, it is the log-softmax over those that are allowed.
"""

from collections.abc import Iterable

import torch

from worker.candidates import CandidateRow, cuts, load_candidates
from worker.device import open_device
from worker.noise import contender_mask, gumbel, row_key
from worker.sampled_rows import NO_TOKEN, SampledRows, SampledToken, SampleRow
from worker.score_edits import edit_scores, edits_scores
from worker.survivors import survivor_mask
from worker.types import SamplingParams

#: below it a row is greedy. Noise is at most 37, so logits would have to lie within 0.037 for it to matter, and
#: what divides by less than this overflows sooner than it randomizes.
MIN_TEMPERATURE = 1e-3
#: scores handled at once, in elements, by device type: a CPU's temporaries stay in its cache, a GPU is kept busy
NUM_SCORES_AT_ONCE = {"cpu": 1 << 17, "cuda": 1 << 22}


class Sampler:
    """Chooses ids below `vocab_size` only: columns past it are padding of the model's output layer."""

    def __init__(self, vocab_size: int, eos_token_ids: Iterable[int], device: torch.device | str) -> None:
        self._vocab_size = vocab_size
        self._eos_token_ids = frozenset(eos_token_ids)
        self._device = open_device(device)
        self._num_scores_at_once = NUM_SCORES_AT_ONCE[torch.device(device).type]
        # Counting those that can win would make the host wait for the device.
        self._looks_for_contenders = not self._device.is_asynchronous
        self._candidates = load_candidates(torch.device(device))

    def sample(self, logits: torch.Tensor, rows: list[SampleRow]) -> list[SampledToken]:
        """One token for each of `rows`, in order, from float32 `logits` [logits rows, at least vocab_size].

        `logits` is not changed. Greedy rows without edits cost one argmax and, together, one copy to the host.
        """
        return self.launch(logits, rows).wait() if rows else []

    def launch(self, logits: torch.Tensor, rows: list[SampleRow]) -> SampledRows:
        """The same without waiting for the device, except where top-p alone cuts (`survivors`)."""
        logits = logits[:, : self._vocab_size]
        return SampledRows(logits, rows, self._chosen(logits, rows), self._device)

    def _chosen(self, logits: torch.Tensor, rows: list[SampleRow]) -> torch.Tensor:
        """int64 [rows], NO_TOKEN where there is none."""
        scored = [place for place, row in enumerate(rows) if not _is_plain_argmax(row)]
        if not scored:
            chosen = self._best(logits, rows)
        else:
            chosen = torch.empty(len(rows), dtype=torch.int64, device=logits.device)
            if plain := sorted(set(range(len(rows))).difference(scored)):
                chosen[self._index(plain)] = self._best(logits, [rows[place] for place in plain])
        if self._candidates is not None:
            scored = self._draw_from_few(logits, rows, scored, chosen)
        if scored:
            chosen[self._index(scored)] = self._choose(logits, [rows[place] for place in scored])
        return chosen

    def _best(self, logits: torch.Tensor, rows: list[SampleRow]) -> torch.Tensor:
        """int64 [rows]: where their logits are greatest."""
        places = [row.logits_row for row in rows]
        if self._candidates is not None:
            return self._candidates.best(logits, places, NO_TOKEN)
        values, best = logits.max(dim=-1)
        return best.masked_fill_(has_no_best(values), NO_TOKEN)[self._index(places)]

    def _draw_from_few(
        self, logits: torch.Tensor, rows: list[SampleRow], scored: list[int], chosen: torch.Tensor
    ) -> list[int]:
        """Fill in what the kernels can decide of the rows at `scored`; returns the places that are left."""
        assert self._candidates is not None
        places = [place for place in scored if not _is_greedy(rows[place].params)]
        if not places:
            return scored
        candidates = []
        for place in places:
            row = rows[place]
            scores = logits[row.logits_row]
            if _edits_scores(row):
                scores = scores.clone()
                self._edit(scores, row)
            key = row_key(row.params.seed, row.sample_index, row.position)
            candidates.append(CandidateRow(scores, row.params, key))
        drawn, undecided = self._candidates.draw(candidates)
        chosen[self._index(places)] = drawn
        decided = set(places) - {places[place] for place in undecided}
        return [place for place in scored if place not in decided]

    def decision_scores(self, logits: torch.Tensor, rows: list[SampleRow]) -> torch.Tensor:
        """float32 [rows, vocab_size]: the scores whose argmax `sample` returns.

        -inf where a token did not survive a cut or had no chance. Whatever comes within `noise.CONTENDER_SLACK`
        of the best score is there, so the margin of a decision can be read as far as that.
        """
        scores = logits[self._index([row.logits_row for row in rows]), : self._vocab_size]
        for place, row in enumerate(rows):
            if _edits_scores(row):
                self._edit(scores[place], row)
        random = [place for place, row in enumerate(rows) if not _is_greedy(row.params)]
        for cut in (False, True):
            places = [place for place in random if cuts(rows[place].params) == cut]
            if places:
                index = self._index(places)
                scores[index] = self._perturbed(scores[index], [rows[place] for place in places], cut=cut)
        return scores

    def _edit(self, scores: torch.Tensor, row: SampleRow) -> None:
        edit_scores(
            scores, row.params, row.prompt_token_ids, row.output_token_ids, self._eos_token_ids, row.allowed
        )

    def _choose(self, logits: torch.Tensor, rows: list[SampleRow]) -> torch.Tensor:
        num_rows_at_once = max(1, self._num_scores_at_once // logits.shape[1])
        slices = [rows[start : start + num_rows_at_once] for start in range(0, len(rows), num_rows_at_once)]
        chosen = []
        for part in slices:
            best = logits[self._index([row.logits_row for row in part])].amax(dim=-1)
            scores = self.decision_scores(logits, part)
            chosen.append(scores.argmax(dim=-1).masked_fill_(has_no_best(best), NO_TOKEN))
        return torch.cat(chosen)

    def _perturbed(self, scores: torch.Tensor, rows: list[SampleRow], *, cut: bool) -> torch.Tensor:
        """Noise where a token may and can win; it is the noise that a pass over the whole vocabulary would add."""
        params = [row.params for row in rows]
        temperatures = self._device.upload([param.temperature for param in params], torch.float32)
        scores = scores / temperatures.unsqueeze(1)
        keys = self._index([row_key(row.params.seed, row.sample_index, row.position) for row in rows])
        mask: torch.Tensor | None = None
        if cut:
            mask = survivor_mask(
                scores,
                [param.top_k for param in params],
                [param.top_p for param in params],
                [param.min_p for param in params],
            )
        elif self._looks_for_contenders:
            mask = contender_mask(scores, keys)
        if mask is None or not self._looks_for_contenders:
            perturbed = scores + gumbel(keys.unsqueeze(1), torch.arange(scores.shape[1], device=scores.device))
            return perturbed if mask is None else perturbed.masked_fill_(~mask, -torch.inf)
        row_ids, token_ids = mask.nonzero(as_tuple=True)
        perturbed = torch.full_like(scores, -torch.inf)
        perturbed[row_ids, token_ids] = scores[row_ids, token_ids] + gumbel(keys[row_ids], token_ids)
        return perturbed

    def _index(self, values: list[int]) -> torch.Tensor:
        return self._device.upload(values, torch.int64)


def _is_greedy(params: SamplingParams) -> bool:
    """Also where only one token can survive: the best one, without noise, is then the same answer for less."""
    return params.temperature < MIN_TEMPERATURE or params.top_k == 1 or params.top_p <= 0


def _edits_scores(row: SampleRow) -> bool:
    return row.allowed is not None or edits_scores(row.params, len(row.output_token_ids))


def _is_plain_argmax(row: SampleRow) -> bool:
    return _is_greedy(row.params) and not _edits_scores(row)


def has_no_best(best: torch.Tensor) -> torch.Tensor:
    """Whether rows with these greatest logits have no token to choose; NaN anywhere in a row is its greatest."""
    return best.isnan() | (best == -torch.inf)

