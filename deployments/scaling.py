"""How many workers the work needs: Serve's autoscaling policy, and the demand that each worker reports for it.

Work is counted against what a worker sustains, in whole workers. Serve's controller imports this module: it loads no
torch. Knows nothing of how Serve starts or stops a worker.
"""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from ray.serve.config import AutoscalingContext

from deployments.scaling_report import ScalingReport
from monitoring.accumulator import Snapshot
from monitoring.scaler_metrics import ScalerMetrics

#: more than this share of what the workers sustain asks for another one
UP_SHARE = 0.8
#: one is given up only where the others would stay below this share: between the two nothing changes
DOWN_SHARE = 0.5
_ROUNDING = 1e-6


@dataclass(frozen=True, slots=True)
class WorkerReport:
    """What one worker holds and sustains.

    `tokens_per_s`: prompt tokens computed a second while there is a queue (0.0 before there was one);
    `done_tokens_per_s`: those computed a second of late. `num_held_requests`: admitted or not.
    """

    num_queued_tokens: float = 0.0
    tokens_per_s: float = 0.0
    done_tokens_per_s: float = 0.0
    num_held_requests: float = 0.0
    max_num_seqs: float = 0.0

    def as_stats(self) -> dict[str, float]:
        """As Serve's autoscaler takes it."""
        return {name: float(value) for name, value in asdict(self).items()}

    def token_demand(self, target_queue_s: float) -> float:
        """Workers that the prompts keep busy: those that come, and as many as empty the queue in `target_queue_s`."""
        if self.tokens_per_s <= 0.0:
            return 0.0
        arriving = min(self.done_tokens_per_s / self.tokens_per_s, 1.0)
        return arriving + self.num_queued_tokens / self.tokens_per_s / target_queue_s

    def sequence_demand(self) -> float:
        """Workers whose sequence slots the requests fill."""
        return self.num_held_requests / self.max_num_seqs if self.max_num_seqs else 0.0


@dataclass(frozen=True, slots=True)
class Demand:
    """What is asked of all workers, in workers."""

    tokens: float
    sequences: float


def demand_of(reports: list[WorkerReport], target_queue_s: float) -> Demand:
    return Demand(
        sum(report.token_demand(target_queue_s) for report in reports),
        sum(report.sequence_demand() for report in reports),
    )


def wanted_workers(reports: list[WorkerReport], num_workers: int, target_queue_s: float) -> int:
    """How many of the present `num_workers` are wanted, or how many more; at least one."""
    both = demand_of(reports, target_queue_s)
    demand = max(both.tokens, both.sequences)
    num_up = math.ceil(demand / UP_SHARE - _ROUNDING)
    num_down = math.ceil(demand / DOWN_SHARE - _ROUNDING)
    return max(num_up, min(num_workers, num_down), 1)


class TokenWorkPolicy:
    """What Serve calls, about ten times a second, in its controller. Bounds, delays and steps are Serve's own."""

    def __init__(self, target_queue_s: float, report: ScalingReport | None = None) -> None:
        """`report`: to whom the choice is told; the application's metrics actor where none is given."""
        self._target_queue_s = target_queue_s
        self._report = ScalingReport() if report is None else report

    def __call__(self, context: AutoscalingContext) -> tuple[int, dict[str, Any]]:
        reports = reports_of(context.aggregated_metrics or {})
        num_workers = context.target_num_replicas
        wanted = wanted_workers(reports, num_workers, self._target_queue_s) if reports else num_workers
        if self._report.is_due:
            self._report.push(context.app_name or "", self._state(context, reports, wanted))
        return wanted, {}

    def _state(self, context: AutoscalingContext, reports: list[WorkerReport], wanted: int) -> Snapshot:
        metrics = ScalerMetrics(context.deployment_name)
        demand = demand_of(reports, self._target_queue_s)
        metrics.set_demand(tokens=demand.tokens, sequences=demand.sequences)
        metrics.set_workers(
            wanted=wanted,
            asked=context.target_num_replicas,
            running=context.current_num_replicas,
            reported=len(reports),
            fewest=context.capacity_adjusted_min_replicas,
            most=context.capacity_adjusted_max_replicas,
        )
        return metrics.snapshot()


def reports_of(metrics: Mapping[str, Mapping[Any, float]]) -> list[WorkerReport]:
    """From values by name, then replica. What a replica has not said yet is nothing."""
    by_replica: dict[Any, dict[str, float]] = {}
    for field in fields(WorkerReport):
        for replica_id, value in metrics.get(field.name, {}).items():
            by_replica.setdefault(replica_id, {})[field.name] = value
    return [WorkerReport(**values) for values in by_replica.values()]
