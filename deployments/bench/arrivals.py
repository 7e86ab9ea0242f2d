"""When requests arrive: fixed before the run by a seeded generator, so that no answer can delay the next request."""

import math
from collections.abc import Sequence
from random import Random


def synthetic_arrivals_s(count: int, rate: float, burstiness: float, seed: int) -> list[float]:
    """Arrival times of `count` requests at a mean of `rate` a second, the first at 0.

    The gaps follow a gamma distribution of shape `burstiness`: 1 is a Poisson process, less is burstier, infinite is
    even. The pattern depends on the seed alone; the rate stretches it, so that two rates see the same bursts, and the
    mean is exactly the rate, not its expectation. An infinite rate means: all at once.
    """
    draw = Random(f"arrivals {seed}")
    times, now = [], 0.0
    for _ in range(count):
        times.append(now)
        now += 1.0 if math.isinf(burstiness) else draw.gammavariate(burstiness, 1.0 / burstiness)
    return at_rate(times, rate)


def at_rate(arrivals_s: Sequence[float], rate: float) -> list[float]:
    """The same pattern, moved to start at 0 and stretched to a mean of `rate` requests a second.

    Raises ValueError for a finite rate where everything arrives at one moment.
    """
    if math.isinf(rate) or len(arrivals_s) < 2:
        return [0.0] * len(arrivals_s)
    own_rate = mean_rate(arrivals_s)
    if math.isinf(own_rate):
        raise ValueError("all requests arrive at the same moment: that cannot be stretched to a rate")
    start = arrivals_s[0]
    return [(arrival - start) * own_rate / rate for arrival in arrivals_s]


def mean_rate(arrivals_s: Sequence[float]) -> float:
    """Requests a second, between the first and the last; infinite where these coincide."""
    if len(arrivals_s) < 2 or arrivals_s[-1] == arrivals_s[0]:
        return math.inf
    return (len(arrivals_s) - 1) / (arrivals_s[-1] - arrivals_s[0])
