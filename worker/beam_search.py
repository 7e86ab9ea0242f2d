"""Beam search of one request: which beams go on, and which answers are kept.

Owns scores and finished answers. Candidates are scored by accumulated log-probability; a finished answer by that
divided by its length to the power of the length penalty. The rules are those of Transformers' `num_beams`, so
that the same model gives the same answers. Knows neither blocks nor the scheduler.
"""

from dataclasses import dataclass
from heapq import nlargest

import torch

from worker.types import BeamParams


@dataclass(slots=True)
class Hypothesis:
    score: float
    token_ids: list[int]
    finish_reason: str


class BeamSearch:
    """`advance` takes the log-probabilities after the running beams and says which ones go on."""

    def __init__(self, params: BeamParams, eos_token_ids: frozenset[int], max_tokens: int) -> None:
        self._params = params
        self._eos_token_ids = eos_token_ids
        self._max_tokens = max_tokens
        self._scores = [0.0]
        self._outputs: list[list[int]] = [[]]
        self._finished: list[Hypothesis] = []
        self.is_done = False

    def advance(self, logits: torch.Tensor) -> list[tuple[int, int]]:
        """Go on with float32 `logits` [running beams, vocabulary], in the order of the beams that were returned last.

        Returns (place of the parent beam, token id) of the beams that go on, best first; empty when the search ends.
        """
        width = self._params.width
        scores = torch.log_softmax(logits, dim=-1) + torch.tensor(self._scores, device=logits.device).unsqueeze(1)
        # Enough candidates that `width` of them go on even if each beam's best ones end.
        count = min(max(2, 1 + len(self._eos_token_ids)) * width, scores.numel())
        best = torch.topk(scores.reshape(-1), count)
        running: list[tuple[float, int, int]] = []
        finished: list[Hypothesis] = []
        length = len(self._outputs[0]) + 1
        for rank, (score, flat) in enumerate(zip(best.values.tolist(), best.indices.tolist(), strict=True)):
            place, token_id = divmod(flat, logits.shape[1])
            is_stop = token_id in self._eos_token_ids
            if not is_stop and length < self._max_tokens:
                running.append((score, place, token_id))
            elif rank < width:
                reason = "stop" if is_stop else "length"
                tokens = [*self._outputs[place], token_id]
                finished.append(Hypothesis(score / length**self._params.length_penalty, tokens, reason))
        if not (self._params.early_stopping is True and self._is_full):
            self._finished = nlargest(width, self._finished + finished, key=lambda hypothesis: hypothesis.score)
        running = running[:width]
        if not running or self._ends_early(running[0][0], length):
            self.is_done = True
            return []
        self._scores = [score for score, _, _ in running]
        self._outputs = [[*self._outputs[place], token_id] for _, place, token_id in running]
        return [(place, token_id) for _, place, token_id in running]

    def best(self, count: int) -> list[Hypothesis]:
        """The `count` best answers. Running beams stand in where the search was cut short before enough had ended."""
        length = max(len(self._outputs[0]), 1)
        cut = [
            Hypothesis(score / length**self._params.length_penalty, output, "length")
            for score, output in zip(self._scores, self._outputs, strict=True)
        ]
        best = self._finished if self.is_done and self._finished else nlargest(
            self._params.width, self._finished + cut, key=lambda hypothesis: hypothesis.score
        )
        return best[:count]

    @property
    def _is_full(self) -> bool:
        return len(self._finished) == self._params.width

    def _ends_early(self, best_running: float, length: int) -> bool:
        if not self._is_full:
            return False
        if self._params.early_stopping is True:
            return True
        if self._params.early_stopping == "never" and self._params.length_penalty > 0.0:
            length = self._max_tokens
        return bool(best_running / length**self._params.length_penalty <= self._finished[-1].score)
