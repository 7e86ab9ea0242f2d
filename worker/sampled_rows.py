"""Tokens that were chosen on the device, and their log-probabilities, on their way to the host in one copy.

Knows how the numbers of one step are packed and told; it chooses nothing.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from worker.device import Device
from worker.types import SamplingParams, TokenLogprobs

#: what a log-probability of minus infinity is reported as: it must be a number in JSON
LOGPROB_FLOOR = -9999.0
#: in place of a token where the model gave no numbers to choose by
NO_TOKEN = -1


@dataclass(slots=True)
class SampleRow:
    """One token to choose. `position` is its absolute position: the number of known tokens before it.

    Several rows may name one `logits_row` (the n first tokens of a group). The token lists are only read, and only
    for penalties and `min_tokens`. `allowed`: bool [vocabulary] on the CPU, what a grammar allows; None: everything.
    """

    logits_row: int
    params: SamplingParams
    sample_index: int
    position: int
    prompt_token_ids: list[int]
    output_token_ids: list[int]
    allowed: torch.Tensor | None = None


@dataclass(slots=True)
class SampledToken:
    """`token_id` is NO_TOKEN where the row's logits hold NaN, or nothing above minus infinity."""

    token_id: int
    logprobs: TokenLogprobs | None


class SampledRows:
    """One token for each of `rows`. `token_ids` int64 [rows] stays on the device, for the pass that computes them."""

    def __init__(
        self, logits: torch.Tensor, rows: list[SampleRow], token_ids: torch.Tensor, device: Device
    ) -> None:
        """`logits` [logits rows, vocabulary] are read here and no more later."""
        self.token_ids = token_ids
        self._rows = rows
        self._device = device
        #: rows that ask for equally many alternatives share one pass; others never see them
        self._places_by_count: dict[int, list[int]] = {}
        for place, row in enumerate(rows):
            if row.params.logprobs is not None:
                self._places_by_count.setdefault(row.params.logprobs, []).append(place)
        self._num_top = logits.shape[1]
        packed = token_ids
        if self._places_by_count:
            # Ids and float32 are exact in float64: one copy holds all.
            parts = [self._score(logits, count, places) for count, places in self._places_by_count.items()]
            packed = torch.cat([token_ids.double(), *parts])
        self._copy = device.to_host(packed)

    def wait(self) -> list[SampledToken]:
        """Once they are here."""
        numbers = self._copy.wait().tolist()
        if not self._places_by_count:
            return [SampledToken(token_id, None) for token_id in numbers]
        sampled = [SampledToken(int(token_id), None) for token_id in numbers[: len(self._rows)]]
        rest = iter(numbers[len(self._rows) :])
        for count, places in self._places_by_count.items():
            self._tell(sampled, rest, count, places)
        return sampled

    def _score(self, logits: torch.Tensor, count: int, places: list[int]) -> torch.Tensor:
        """float64, flat: of each place, its own log-probability, then those of the best, then the ids of these."""
        raw = logits[self._device.upload([self._rows[place].logits_row for place in places], torch.int64)]
        for own_raw, place in zip(raw, places, strict=True):
            if (allowed := self._rows[place].allowed) is not None:
                own_raw.masked_fill_(~self._device.send(allowed), -torch.inf)
        normalizer = raw.logsumexp(dim=-1, keepdim=True)
        chosen = self.token_ids[self._device.upload(places, torch.int64)].clamp(min=0).unsqueeze(1)
        own = (raw.gather(1, chosen) - normalizer).squeeze(1)
        top = raw.topk(min(count, raw.shape[1]), dim=-1)
        return torch.cat([part.double().flatten() for part in (own, top.values - normalizer, top.indices)])

    def _tell(self, sampled: list[SampledToken], numbers: Iterator[float], count: int, places: list[int]) -> None:
        num_top = min(count, self._num_top)
        own = [next(numbers) for _ in places]
        values = [[next(numbers) for _ in range(num_top)] for _ in places]
        ids = [[int(next(numbers)) for _ in range(num_top)] for _ in places]
        for place, value, top_values, top_ids in zip(places, own, values, ids, strict=True):
            if sampled[place].token_id == NO_TOKEN:
                continue
            best_first = sorted(zip(top_ids, top_values, strict=True), key=lambda pair: (-pair[1], pair[0]))
            if self._rows[place].allowed is not None:
                best_first = [pair for pair in best_first if pair[1] > -math.inf]
            sampled[place].logprobs = (floored(value), [(token_id, floored(lp)) for token_id, lp in best_first])


def floored(logprob: float) -> float:
    return max(logprob, LOGPROB_FLOOR) if math.isfinite(logprob) else LOGPROB_FLOOR
