"""An online estimate of how long a step takes, learnt step by step from what steps did and how long they took.

Reads no clock. `step_fit.py` fits whole recordings; this one forgets, and costs the same in every step.
"""

from dataclasses import dataclass

from scheduler.least_squares import solve_not_negative

#: steps that the estimate remembers: one so many steps ago weighs 1/e
MEMORY_STEPS = 400.0
#: a step that took longer than so many times what was foreseen counts as that: another process, a page fault
MAX_SURPRISE = 2.0
#: a foreseen time below this share of what a step took says that there never was a step of its kind
NOTHING_FORESEEN = 1e-3
#: until so many steps have been seen, nothing is foreseen
MIN_STEPS_SEEN = 8
#: coefficients are solved for again every so many steps
STEPS_BETWEEN_SOLVING = 4
_NUM_TERMS = 5


@dataclass(frozen=True, slots=True)
class StepLoad:
    """What a step holds beside its prompt tokens: decode rows, the tokens that they read, and the tokens that stand
    before its first prompt chunk."""

    num_decodes: int
    num_context_tokens: int
    num_prompt_context_tokens: int


class StepTimeEstimate:
    """t = a + b·prefill + c·decodes + d·context + e·prefill·(its context), none of them below zero.

    Least squares over relative errors, by sums that forget.
    """

    def __init__(self) -> None:
        self._matrix = [[0.0] * _NUM_TERMS for _ in range(_NUM_TERMS)]
        self._target = [0.0] * _NUM_TERMS
        self._coefficients = [0.0] * _NUM_TERMS
        self.num_steps = 0

    def predict_s(self, load: StepLoad, num_prefill_tokens: int) -> float:
        a, b, c, d, e = self._coefficients
        product = num_prefill_tokens * (load.num_prompt_context_tokens + num_prefill_tokens / 2)
        return a + b * num_prefill_tokens + c * load.num_decodes + d * load.num_context_tokens + e * product

    def learn(self, load: StepLoad, num_prefill_tokens: int, duration_s: float) -> None:
        if duration_s <= 0.0:
            return
        expected_s = duration_s
        if self.num_steps >= MIN_STEPS_SEEN:
            # Errors relative to what is foreseen: relative to what was measured, short steps would weigh more.
            foreseen_s = self.predict_s(load, num_prefill_tokens)
            if foreseen_s > NOTHING_FORESEEN * duration_s:
                expected_s = foreseen_s
                duration_s = min(duration_s, MAX_SURPRISE * expected_s)
        product = num_prefill_tokens * (load.num_prompt_context_tokens + num_prefill_tokens / 2)
        terms = (1.0, num_prefill_tokens, load.num_decodes, load.num_context_tokens, product)
        relative = [term / expected_s for term in terms]
        time = duration_s / expected_s
        keep = 1.0 - 1.0 / MEMORY_STEPS
        for i, term in enumerate(relative):
            self._target[i] = keep * self._target[i] + term * time
            row = self._matrix[i]
            for j, other in enumerate(relative):
                row[j] = keep * row[j] + term * other
        self.num_steps += 1
        if self.num_steps % STEPS_BETWEEN_SOLVING == 0:
            self._coefficients = self._solve()

    def _solve(self) -> list[float]:
        """In units in which every term is of one size, as the terms differ by many powers of ten."""
        scales = [self._matrix[i][i] ** 0.5 or 1.0 for i in range(_NUM_TERMS)]
        matrix = [
            [x / (scales[i] * scales[j]) for j, x in enumerate(row)] for i, row in enumerate(self._matrix)
        ]
        target = [x / scale for x, scale in zip(self._target, scales, strict=True)]
        return [c / scale for c, scale in zip(solve_not_negative(matrix, target), scales, strict=True)]
