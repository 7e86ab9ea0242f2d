"""Several targets under the same load: medians over the rounds, and their ratios to the first target's."""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from deployments.bench.summary import Summary

#: what is compared: a name, and where it stands in a summary
COMPARED: dict[str, Callable[[Summary], float | None]] = {
    "output_tokens_per_s": lambda summary: summary.output_tokens_per_s,
    "goodput_requests_per_s": lambda summary: summary.goodput_requests_per_s,
    "ttft_p50_s": lambda summary: summary.latencies.ttft.p50,
    "ttft_p99_s": lambda summary: summary.latencies.ttft.p99,
    "itl_p50_s": lambda summary: summary.latencies.itl.p50,
    "itl_p99_s": lambda summary: summary.latencies.itl.p99,
    "itl_max_s": lambda summary: summary.latencies.itl.max,
    "e2e_p50_s": lambda summary: summary.latencies.e2e.p50,
    "e2e_p99_s": lambda summary: summary.latencies.e2e.p99,
}


@dataclass(frozen=True, slots=True)
class Compared:
    """One target. `ratios` are medians of the ratios of each round, so that a round on a slow machine does not tilt
    them; None where either side has no value."""

    target: str
    num_rounds: int
    num_failed: int
    medians: dict[str, float | None]
    ratios: dict[str, float | None]

    def to_dict(self) -> dict[str, Any]:
        return {
            "target": self.target,
            "rounds": self.num_rounds,
            "num_failed": self.num_failed,
            "medians": self.medians,
            "ratios_to_first": self.ratios,
        }


def compare(rounds: Sequence[Sequence[Summary]]) -> list[Compared]:
    """`rounds[i]` holds the summaries of target i, round by round."""
    first = rounds[0]
    compared = []
    for summaries in rounds:
        medians: dict[str, float | None] = {}
        ratios: dict[str, float | None] = {}
        for name, value_of in COMPARED.items():
            values = [value_of(summary) for summary in summaries]
            medians[name] = _median(values)
            pairs = zip(values, (value_of(summary) for summary in first), strict=True)
            ratios[name] = _median([None if own is None or not base else own / base for own, base in pairs])
        num_failed = sum(summary.num_failed for summary in summaries)
        compared.append(Compared(summaries[0].target, len(summaries), num_failed, medians, ratios))
    return compared


def _median(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.median(known) if known and len(known) == len(values) else None
