"""Every metric once, by name. Knows neither who counts nor how series are stored."""

from monitoring.ingress_table import INGRESS_METRICS
from monitoring.metric import (
    INGRESS,
    LIVE_OPTIONS,
    OTHER_TENANT,
    REJECTION_REASONS,
    SCALER,
    TENANT,
    WORKER,
    Metric,
    MetricKind,
    gauge,
)
from monitoring.scaler_table import SCALER_METRICS
from monitoring.worker_table import WORKER_METRICS

__all__ = [
    "INGRESS",
    "LIVE_OPTIONS",
    "METRICS",
    "OTHER_TENANT",
    "REJECTION_REASONS",
    "SCALER",
    "TENANT",
    "WORKER",
    "WORKER_UP",
    "Metric",
    "MetricKind",
    "counted_by",
]

#: The one series that the store itself makes: it alone sees who has fallen silent.
WORKER_UP = gauge(
    "stallfree_worker_up",
    "1 while the worker of this rank reports, 0 once it has been silent for 5 s without having said goodbye; a worker "
    "whose engine is stuck in a step reports nothing",
    WORKER,
)

METRICS: dict[str, Metric] = {
    metric.name: metric for metric in (WORKER_UP, *WORKER_METRICS, *INGRESS_METRICS, *SCALER_METRICS)
}


def counted_by(identity: tuple[str, ...]) -> list[Metric]:
    """The metrics that a source with these identity labels keeps (all but the store's own)."""
    return [metric for metric in METRICS.values() if metric.identity == identity and metric is not WORKER_UP]
