"""The highest rate that keeps a service level: by doubling or halving until it is enclosed, then by bisection."""

import math
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

#: a target that does not keep the level at this rate (requests a second) has no capacity worth a number
MIN_RATE = 0.05
MAX_RATE = 10_000.0


@dataclass(frozen=True, slots=True)
class Trial:
    """One rate that was tried; `miss` says why it does not keep the level, None that it does."""

    rate: float
    miss: str | None


@dataclass(slots=True)
class Capacity:
    """`rate` is the highest that kept the level (None: not even the lowest), `lowest_miss` the lowest that did not
    (None: none was found, so the capacity is at least `rate`). `why_ended`: precision, time, min_rate, max_rate."""

    rate: float | None
    lowest_miss: float | None
    why_ended: str
    trials: list[Trial] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        return {
            "rate": self.rate,
            "lowest_miss": self.lowest_miss,
            "why_ended": self.why_ended,
            "trials": [{"rate": trial.rate, "miss": trial.miss} for trial in self.trials],
        }


async def search_capacity(
    measure: Callable[[float], Awaitable[str | None]],
    *,
    start_rate: float,
    precision: float,
    max_search_s: float,
    clock: Callable[[], float],
    min_rate: float = MIN_RATE,
    max_rate: float = MAX_RATE,
) -> Capacity:
    """`measure(rate)` runs the load at a rate and says why it misses the level, or None.

    Ends when the lowest miss is within `precision` (0.05: five percent) of the highest rate that was kept, or at the
    first trial that would begin after `max_search_s`. Time spent in a trial is bounded by whoever measures.
    """
    deadline_s = clock() + max_search_s
    capacity = Capacity(None, None, "precision")
    rate: float | None = start_rate
    while rate is not None:
        if capacity.trials and clock() >= deadline_s:
            capacity.why_ended = "time"
            return capacity
        miss = await measure(rate)
        capacity.trials.append(Trial(rate, miss))
        if miss is None:
            capacity.rate = rate
        else:
            capacity.lowest_miss = rate
        rate = _next_rate(capacity, precision, min_rate, max_rate)
    if capacity.rate is None:
        capacity.why_ended = "min_rate"
    elif capacity.lowest_miss is None:
        capacity.why_ended = "max_rate"
    return capacity


def _next_rate(capacity: Capacity, precision: float, min_rate: float, max_rate: float) -> float | None:
    kept, missed = capacity.rate, capacity.lowest_miss
    if missed is None:
        assert kept is not None
        return min(kept * 2, max_rate) if kept < max_rate else None
    if kept is None:
        return max(missed / 2, min_rate) if missed > min_rate else None
    # In the middle of the ratio, not of the difference: the precision is a ratio as well.
    return math.sqrt(kept * missed) if missed > kept * (1.0 + precision) else None
