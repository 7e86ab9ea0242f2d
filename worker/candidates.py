"""Draws tokens from the few of each row that can still be chosen, found by our CPU kernels in one pass; or the best.

Gives the token that the whole row would give: the same survivors and the same noise. A row for which the few do not
suffice is left to the caller. Knows rows of scores, not requests.
"""

import math
from dataclasses import dataclass

import torch

from worker import noise
from worker.native.build import NativeUnavailableError, ensure_kernels
from worker.native.kernels import Kernels
from worker.native.structures import BestTokens, Selection
from worker.survivors import survivor_mask
from worker.types import SamplingParams

#: tokens kept of a row; more are left to the caller
CAPACITY = 8192
#: how far below the best score a row that is cut keeps its tokens, if they are not too many: e^-16 of its probability
REACH = 16.0


@dataclass(slots=True, eq=False)
class CandidateRow:
    """float32 scores [vocabulary] before the temperature, contiguous, and the key of the row's noise."""

    scores: torch.Tensor
    params: SamplingParams
    key: int


def cuts(params: SamplingParams) -> bool:
    """Whether top-k, top-p or min-p may take tokens away."""
    return params.top_k > 0 or params.top_p < 1 or params.min_p > 0


def load_candidates(device: torch.device) -> "Candidates | None":
    """None where there are no kernels: not on a CPU, or not on this one."""
    if device.type != "cpu":
        return None
    try:
        return Candidates(Kernels(ensure_kernels()))
    except NativeUnavailableError:
        return None  # the choice of the attention backend has said so already


class Candidates:
    def __init__(self, kernels: Kernels) -> None:
        self._kernels = kernels
        self._ids = torch.empty((0, CAPACITY), dtype=torch.int64)
        self._scores = torch.empty((0, CAPACITY))

    def best(self, logits: torch.Tensor, places: list[int], no_token: int) -> torch.Tensor:
        """int64 [len(places)]: the lowest token of the greatest of float32 `logits` [rows, vocabulary] in those rows.

        `no_token` where a row holds NaN, or nothing above minus infinity.
        """
        assert logits.dtype == torch.float32
        assert logits.stride(1) == 1
        assert 0 <= min(places) <= max(places) < len(logits)
        rows, chosen = torch.tensor(places), torch.empty(len(places), dtype=torch.int64)
        pointers = (logits.data_ptr(), rows.data_ptr(), chosen.data_ptr())
        best = BestTokens(*pointers, len(places), logits.stride(0), logits.shape[1], no_token)
        self._kernels.best_tokens(best, torch.get_num_threads())
        return chosen

    def draw(self, rows: list[CandidateRow]) -> tuple[torch.Tensor, list[int]]:
        """(int64 token ids [rows], places in `rows` that are undecided: their ids mean nothing)."""
        keys = torch.tensor([row.key for row in rows])
        ids, scores, counts, masses, reaches = self._select(rows, keys)
        width = max(1, int(counts.max()))
        ids, scores = ids[:, :width], scores[:, :width]
        mask = torch.arange(width) < counts.unsqueeze(1)
        scores = scores.masked_fill(~mask, -torch.inf)
        undecided = counts < 0
        cut = [place for place, row in enumerate(rows) if cuts(row.params) and counts[place] >= 0]
        if cut:
            index = torch.tensor(cut)
            params = [rows[place].params for place in cut]
            vocab_size = rows[0].scores.shape[0]
            undecided[index] |= ~_suffice(
                scores[index], counts[index], masses[index], reaches[index], params, vocab_size
            )
            mask[index] &= survivor_mask(
                scores[index],
                [param.top_k for param in params],
                [param.top_p for param in params],
                [param.min_p for param in params],
                vocab_size=vocab_size,
                whole_mass=masses[index].unsqueeze(1),
            )
        row_ids, places = mask.nonzero(as_tuple=True)
        perturbed = torch.full_like(scores, -torch.inf)
        perturbed[row_ids, places] = scores[row_ids, places] + noise.gumbel(keys[row_ids], ids[row_ids, places])
        chosen = ids.gather(1, perturbed.argmax(dim=-1, keepdim=True)).squeeze(1)
        return chosen, undecided.nonzero().squeeze(1).tolist()

    def _select(
        self, rows: list[CandidateRow], keys: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        """ids, scores [rows, CAPACITY] (over the temperature); counts, masses of the whole rows, reaches [rows].

        The next call overwrites ids and scores.
        """
        num_rows = len(rows)
        assert all(row.scores.is_contiguous() for row in rows)
        pointers = torch.tensor([row.scores.data_ptr() for row in rows])
        temperatures = torch.tensor([row.params.temperature for row in rows], dtype=torch.float32)
        is_cut = torch.tensor([int(cuts(row.params)) for row in rows])
        if len(self._ids) < num_rows:
            self._ids = torch.empty((num_rows, CAPACITY), dtype=torch.int64)
            self._scores = torch.empty((num_rows, CAPACITY))
        ids, scores = self._ids[:num_rows], self._scores[:num_rows]
        counts, masses = torch.empty(num_rows, dtype=torch.int64), torch.zeros(num_rows, dtype=torch.float64)
        reaches = torch.zeros(num_rows)
        tensors = (pointers, temperatures, keys, is_cut, ids, scores, counts, masses, reaches)
        selection = Selection(
            *(tensor.data_ptr() for tensor in tensors),
            num_rows,
            rows[0].scores.shape[0],
            CAPACITY,
            *noise.HASH_CONSTANTS,
            REACH,
            noise.CONTENDER_SLACK,
            noise.CONTENDER_MARGIN,
        )
        self._kernels.select_tokens(selection, torch.get_num_threads())
        return ids, scores, counts, masses, reaches


def _suffice(
    scores: torch.Tensor,
    counts: torch.Tensor,
    masses: torch.Tensor,
    reaches: torch.Tensor,
    params: list[SamplingParams],
    vocab_size: int,
) -> torch.Tensor:
    """bool [rows]: whether no token outside `scores` could survive a row's cuts."""
    shares = (scores - scores.amax(dim=-1, keepdim=True)).exp_().sum(dim=-1, dtype=torch.float64)
    is_whole = counts == vocab_size
    floors = torch.tensor([math.log(param.min_p) if param.min_p > 0 else -math.inf for param in params])
    by_min_p = floors > -reaches
    by_top_k = counts >= torch.tensor([param.top_k if param.top_k > 0 else vocab_size for param in params])
    has_top_k = torch.tensor([param.top_k > 0 for param in params])
    # Without top-k, top-p is a share of the whole row's mass; with it, of the k best, which are here if by_top_k.
    top_p = torch.tensor([param.top_p for param in params], dtype=torch.float64)
    by_top_p = ~has_top_k & (top_p < 1) & (shares >= top_p * masses)
    return is_whole | by_min_p & ~has_top_k & (top_p >= 1) | by_top_k | by_top_p
