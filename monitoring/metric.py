"""What a metric is: name, type, help, labels, buckets. The tables beside this file have each of them once.

`identity` names the labels that tell one source's series from another's: `model` on the ingress's series,
`model` and `worker` (the replica's rank) on the workers', `deployment` on the autoscaler's. `label` is the one
further label, whose values are closed and start at zero, so that a rate exists from the first scrape on. The values of
`TENANT` are those tenants that the operator declared, and `other`. No label ever carries a value that a client chose.
"""

from dataclasses import dataclass
from enum import Enum


class MetricKind(Enum):
    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"
    #: 1, with what is to be known in its labels
    INFO = "info"


INGRESS = ("model",)
#: options that may change while a worker runs
LIVE_OPTIONS = (
    *("max_num_batched_tokens", "max_num_seqs", "target_itl_ms"),
    *("max_queued_tokens", "max_queued_requests"),
)
#: parts of a request's time that have a histogram
PHASES = ("queue", "prefill", "interference", "decode", "preempted")
#: why a request was turned away
REJECTION_REASONS = (
    *("queue_full", "open_requests", "draining", "unavailable"),
    *("deadline", "too_long", "refused"),
)
WORKER = ("model", "worker")
#: the deployment that is scaled
SCALER = ("deployment",)
#: the one label whose values the operator declares, beside those in the table
TENANT = "tenant"
#: everybody that is not declared
OTHER_TENANT = "other"


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric. A counter's `name` ends in `_total`, an info's in `_info`; `buckets` are ascending upper bounds
    without +Inf. `info_labels` have values that the build or the operator chose."""

    name: str
    kind: MetricKind
    help: str
    identity: tuple[str, ...]
    label: str | None = None
    label_values: tuple[str, ...] = ("",)
    buckets: tuple[float, ...] = ()
    info_labels: tuple[str, ...] = ()


def counter(name: str, help: str, identity: tuple[str, ...], label: str | None = None, *values: str) -> Metric:
    return Metric(name, MetricKind.COUNTER, help, identity, label, values or ("",))


def gauge(name: str, help: str, identity: tuple[str, ...], label: str | None = None, *values: str) -> Metric:
    return Metric(name, MetricKind.GAUGE, help, identity, label, values or ("",))


def histogram(name: str, help: str, identity: tuple[str, ...], buckets: tuple[float, ...]) -> Metric:
    return Metric(name, MetricKind.HISTOGRAM, help, identity, buckets=buckets)


def info(name: str, help: str, identity: tuple[str, ...], *labels: str) -> Metric:
    return Metric(name, MetricKind.INFO, help, identity, info_labels=labels)
