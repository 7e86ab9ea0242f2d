"""Percentiles, and what one run comes to. Failed requests are counted and shown, never averaged in."""

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Percentiles:
    """In the unit of the values; None throughout where there are none."""

    count: int
    mean: float | None
    p50: float | None
    p90: float | None
    p99: float | None
    max: float | None

    def scaled(self, factor: float) -> dict[str, float | int | None]:
        def times(value: float | None) -> float | None:
            return None if value is None else value * factor

        return {
            "count": self.count,
            "mean": times(self.mean),
            "p50": times(self.p50),
            "p90": times(self.p90),
            "p99": times(self.p99),
            "max": times(self.max),
        }


def percentile(values: Sequence[float], rank: float) -> float:
    """The smallest value that at least `rank` percent of the values do not exceed (nearest rank). Raises ValueError
    for no values. Unlike an interpolated one it was measured, and p99 of a few values is their largest."""
    return _of_sorted(sorted(values), rank)


def percentiles(values: Iterable[float]) -> Percentiles:
    ordered = sorted(values)
    if not ordered:
        return Percentiles(0, None, None, None, None, None)
    return Percentiles(
        len(ordered),
        math.fsum(ordered) / len(ordered),
        _of_sorted(ordered, 50.0),
        _of_sorted(ordered, 90.0),
        _of_sorted(ordered, 99.0),
        ordered[-1],
    )


def most_common(messages: Iterable[str], count: int) -> dict[str, int]:
    """The commonest messages, commonest first, and how often each occurred."""
    return dict(Counter(messages).most_common(count))


def _of_sorted(ordered: Sequence[float], rank: float) -> float:
    if not ordered:
        raise ValueError("no values have no percentile")
    return ordered[max(1, math.ceil(len(ordered) * rank / 100.0)) - 1]
