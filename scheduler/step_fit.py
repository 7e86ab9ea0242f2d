"""Fits a step-time model to measured steps: least squares over relative errors, robust and never negative.

Owns the sums and the solving, in plain Python. Knows nothing of files.
"""

from collections.abc import Sequence as Rows
from dataclasses import replace
from statistics import fmean, median

from scheduler.arrivals import Arrival
from scheduler.least_squares import solve_not_negative
from scheduler.listening import RunListener
from scheduler.outputs import SchedulerOutputs, SequenceEnd
from scheduler.records import StepRecord
from scheduler.step_model import PRESETS, StepModel, StepWork, step_work

#: more steps than this say nothing more about six numbers
MAX_STEPS_TO_FIT = 4000
MIN_STEPS_TO_FIT = 20
NUM_ROUNDS = 12
#: relative errors beyond so many robust standard deviations count less the larger they are (Huber's weights); wide,
#: since a queue grows by the mean of the steps, ordinary noise included
HUBER_WIDTH = 3.0
#: pauses beyond this share of them are somebody else's doing
PAUSE_SHARE = 0.98
_MAD_TO_SIGMA = 1.4826


class FitError(ValueError):
    """There is not enough to fit a model to."""


class StepTimes(RunListener):
    """Collects what each step of a replayed run did, how long it took, and the pauses between steps."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._num_open = 0
        self._begun_s: dict[int, float] = {}
        self._last_end_s: float | None = None
        self.works: list[StepWork] = []
        self.durations_s: list[float] = []
        self.pauses_s: list[float] = []

    def arrived(self, arrival: Arrival) -> None:
        if self._num_open == 0 and not self._begun_s:
            self._last_end_s = None  # the pause before it was idle
        self._num_open += arrival.num_open_samples

    def planned(self, outputs: SchedulerOutputs, record: StepRecord) -> None:
        if self._last_end_s is not None and not self._begun_s:
            self.pauses_s.append(record.time_s - self._last_end_s)
            self._last_end_s = None
        if not outputs.is_empty:
            self._begun_s[outputs.step_id] = record.time_s

    def settled(self, outputs: SchedulerOutputs, now: float, tokens: list[tuple[str, int]]) -> None:
        self.works.append(step_work(outputs, self._block_size))
        begun_s = self._begun_s.pop(outputs.step_id)
        if self._last_end_s is not None:
            begun_s = max(begun_s, self._last_end_s)  # it was planned while another one ran
        self.durations_s.append(now - begun_s)
        self._last_end_s = now

    def ended(self, ends: list[SequenceEnd], now: float) -> None:
        self._num_open -= len(ends)

    def fit(self) -> StepModel:
        """Raises FitError if there were too few steps."""
        model = fit_step_model(self.works, self.durations_s)
        pauses_s = sorted(self.pauses_s)[: max(int(len(self.pauses_s) * PAUSE_SHARE), 1)]
        pause_s = fmean(pauses_s) if pauses_s else 0.0
        copied_token_s = model.copied_token_s
        if not any(work[5] for work in self.works):
            copied_token_s = PRESETS["cpu-demo"].copied_token_s  # never seen: better a guess than for nothing
        return replace(model, copied_token_s=copied_token_s, between_steps_s=max(pause_s, 0.0))


def fit_step_model(works: Rows[StepWork], durations_s: Rows[float]) -> StepModel:
    """The model with the smallest relative errors; outliers weigh little. Raises FitError for too few steps."""
    stride = max(1, len(works) // MAX_STEPS_TO_FIT)
    pairs = [(w, t) for w, t in zip(works[::stride], durations_s[::stride], strict=True) if t > 0.0]
    if len(pairs) < MIN_STEPS_TO_FIT:
        raise FitError(f"{len(pairs)} steps are too few to fit a step-time model: {MIN_STEPS_TO_FIT} are needed")
    times = [t for _, t in pairs]
    scales = [max(max(abs(work[column]) for work, _ in pairs), 1e-300) for column in range(6)]
    rows = [tuple(term / scale for term, scale in zip(work, scales, strict=True)) for work, _ in pairs]
    expected = [median(times)] * len(rows)
    robust = [1.0] * len(rows)
    solution = [0.0] * 6
    for _ in range(NUM_ROUNDS):
        # Relative to what is expected, not to what was measured: else the model would lean to the steps that
        # happened to be short.
        weights = [factor / m**2 for factor, m in zip(robust, expected, strict=True)]
        solution = _fit_rows(rows, times, weights)
        floor = median(times) / 100
        expected = [max(sum(x * c for x, c in zip(row, solution, strict=True)), floor) for row in rows]
        errors = [abs(t - m) / m for t, m in zip(times, expected, strict=True)]
        width = HUBER_WIDTH * max(_MAD_TO_SIGMA * median(errors), 1e-6)
        robust = [1.0 if error <= width else width / error for error in errors]
    return StepModel(*(c / scale for c, scale in zip(solution, scales, strict=True)))


def _fit_rows(rows: Rows[tuple[float, ...]], times: Rows[float], weights: Rows[float]) -> list[float]:
    """Coefficients of `rows` to `times`, none of them below zero."""
    size = len(rows[0])
    matrix = [[0.0] * size for _ in range(size)]
    target = [0.0] * size
    for row, time_s, weight in zip(rows, times, weights, strict=True):
        for i, term in enumerate(row):
            if term:
                weighted = weight * term
                target[i] += weighted * time_s
                line = matrix[i]
                for j in range(i, size):
                    line[j] += weighted * row[j]
    for i in range(size):
        for j in range(i):
            matrix[i][j] = matrix[j][i]
    return solve_not_negative(matrix, target)
