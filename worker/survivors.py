"""Which tokens survive top-k, top-p and min-p. Owns no state; knows neither requests nor noise.

Each row is judged by its own numbers alone: no size, limit or order in here comes from another row.
"""

import math

import torch

from worker.device import open_device

#: how many of the best scores are ranked at first; a row whose limits reach past them is ranked whole
NUM_RANKED = 1024


def survivor_mask(
    scores: torch.Tensor,
    top_k: list[int],
    top_p: list[float],
    min_p: list[float],
    *,
    vocab_size: int | None = None,
    whole_mass: torch.Tensor | None = None,
) -> torch.Tensor:
    """bool [rows, vocabulary] of the tokens that may be drawn from float32 `scores` (logits over temperature).

    top-k keeps the k best (0: off). top-p keeps, of those and renormalized over them, the fewest best tokens whose
    mass reaches p (1.0: off). min-p keeps what has at least that share of the best token's probability (0.0: off).
    Equal scores at a border go to the lower token id. The best token always survives.

    Where `scores` holds only the best of a larger vocabulary, filled up with minus infinity, `vocab_size` is that
    vocabulary's and `whole_mass` float64 [rows, 1] the sum of exp(score - best) over all of it.

    On CUDA the host waits only where the limits of a row may reach past `NUM_RANKED`: top-p without a small top-k.
    """
    upload = open_device(scores.device).upload
    mask = torch.ones_like(scores, dtype=torch.bool)
    if any(min_p):
        floors = [math.log(share) if share > 0 else -math.inf for share in min_p]
        distance = upload(floors, scores.dtype).unsqueeze(1)
        mask &= scores >= scores.amax(dim=-1, keepdim=True) + distance
    ranked_rows = [row for row, k in enumerate(top_k) if k > 0 or top_p[row] < 1]
    if ranked_rows:
        index = upload(ranked_rows, torch.int64)
        vocab_size = vocab_size or scores.shape[1]
        k_limits = [min(top_k[row], vocab_size) if top_k[row] > 0 else vocab_size for row in ranked_rows]
        mask[index] &= _best_of(
            scores[index],
            upload(k_limits, torch.int64).unsqueeze(1),
            upload([top_p[row] for row in ranked_rows], torch.float64).unsqueeze(1),
            vocab_size,
            None if whole_mass is None else whole_mass[index],
            may_reach_past=max(k_limits) > NUM_RANKED,
        )
    return mask


def _best_of(
    scores: torch.Tensor,
    k_limits: torch.Tensor,
    p_limits: torch.Tensor,
    vocab_size: int,
    whole_mass: torch.Tensor | None,
    *,
    may_reach_past: bool,
) -> torch.Tensor:
    num_ranked = min(NUM_RANKED, scores.shape[1])
    ranked = scores.topk(num_ranked, dim=-1).values
    if whole_mass is None:
        whole_mass = (scores - ranked[:, :1]).exp_().sum(dim=-1, keepdim=True, dtype=torch.float64)
    num_kept = _num_kept(ranked, whole_mass, k_limits, p_limits)
    border = ranked.gather(1, num_kept - 1)
    if not may_reach_past:
        return _above(scores, border, num_kept)
    reaches_past = (k_limits > num_ranked) & ((num_kept == num_ranked) | (k_limits < vocab_size))
    rows = reaches_past.squeeze(1).nonzero().squeeze(1)
    if rows.numel():
        ranked = scores[rows].sort(dim=-1, descending=True).values
        num_kept[rows] = _num_kept(ranked, whole_mass[rows], k_limits[rows], p_limits[rows])
        border[rows] = ranked.gather(1, num_kept[rows] - 1)
    return _above(scores, border, num_kept)


def _num_kept(
    ranked: torch.Tensor, whole_mass: torch.Tensor, k_limits: torch.Tensor, p_limits: torch.Tensor
) -> torch.Tensor:
    """int64 [rows, 1]: how many of the best survive, given scores in falling order and the mass of the whole row.

    Sums run in float64: their order may differ with the number of rows, and then differs far below any decision.
    """
    in_k = torch.arange(ranked.shape[1], device=ranked.device) < k_limits
    mass = (ranked - ranked[:, :1]).exp_().double().masked_fill_(~in_k, 0.0)
    total = torch.where(k_limits <= ranked.shape[1], mass.sum(dim=-1, keepdim=True), whole_mass)
    mass_before = mass.cumsum(dim=-1) - mass
    kept = in_k & ((mass_before < p_limits * total) | (p_limits >= 1))
    return kept.sum(dim=-1, keepdim=True).clamp_(min=1)


def _above(scores: torch.Tensor, border: torch.Tensor, num_kept: torch.Tensor) -> torch.Tensor:
    """The `num_kept` best of each row, given the score of the last of them."""
    above = scores > border
    at_border = scores == border
    num_wanted = num_kept - above.sum(dim=-1, keepdim=True)
    # Asking whether there are too many would make the host wait for a GPU.
    if scores.is_cuda or bool((at_border.sum(dim=-1, keepdim=True) > num_wanted).any()):
        at_border &= at_border.cumsum(dim=-1) <= num_wanted
    return above | at_border
