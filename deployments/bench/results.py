"""All that one benchmark found, and its form as JSON."""

from dataclasses import dataclass, field
from typing import Any

from deployments.bench.capacity import Capacity
from deployments.bench.comparison import Compared
from deployments.bench.session import Measured
from deployments.bench.slo import Slo
from deployments.bench.summary import Summary


@dataclass(slots=True)
class Results:
    """`solo_gap_s` is the pace of a lone request, where a limit was stated as a multiple of it."""

    workload: str
    slo: Slo
    seed: int
    solo_gap_s: float | None = None
    measured: list[Measured] = field(default_factory=list)
    capacities: dict[str, Capacity] = field(default_factory=dict)
    compared: list[Compared] = field(default_factory=list)
    #: what must be said beside the figures
    notes: list[str] = field(default_factory=list)

    def unanswered(self) -> list[Summary]:
        """For each target of which no run got an answer, its last one."""
        last = {measured.summary.target: measured.summary for measured in self.measured}
        answered = {measured.summary.target for measured in self.measured if not measured.summary.is_unanswered}
        return [summary for target, summary in last.items() if target not in answered]

    def shown_runs(self) -> list[Measured]:
        """The run of each target to look at closely: the newest at the highest rate that went to its end."""
        best: dict[str, Measured] = {}
        for measured in self.measured:
            known = best.get(measured.summary.target)
            if measured.run.abandoned is not None and known is not None:
                continue
            if (
                known is None
                or known.run.abandoned is not None
                or measured.summary.offered_rate >= known.summary.offered_rate
            ):
                best[measured.summary.target] = measured
        return list(best.values())

    def to_dict(self) -> dict[str, Any]:
        limits = {"ttft_ms": self.slo.ttft_s, "itl_ms": self.slo.itl_s, "solo_itl_ms": self.solo_gap_s}
        return {
            "workload": self.workload,
            "notes": self.notes,
            "seed": self.seed,
            "slo": {name: None if value is None else value * 1e3 for name, value in limits.items()},
            "runs": [_without_infinity(measured.summary.to_dict()) for measured in self.measured],
            "capacity": {target: found.to_dict() for target, found in self.capacities.items()},
            "comparison": [column.to_dict() for column in self.compared],
        }


def _without_infinity(summary: dict[str, Any]) -> dict[str, Any]:
    """JSON knows no infinity: a rate of None means that all requests were sent at once."""
    return summary | {"offered_rate": None} if summary["offered_rate"] == float("inf") else summary
