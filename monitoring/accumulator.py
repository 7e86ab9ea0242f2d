"""Cumulative totals of one source (a worker, an ingress replica) since its process started.

Owns counting, checked against the table. Knows neither Ray nor who reads the snapshots.
"""

from bisect import bisect_left
from collections.abc import Collection, Mapping
from typing import TypedDict

from monitoring.table import TENANT, Metric, MetricKind, counted_by


class HistogramTotals(TypedDict):
    """`counts[i]` observations fell into bucket i (not cumulated over buckets); the last one is +Inf's."""

    counts: list[int]
    sum: float


class Snapshot(TypedDict):
    """Plain data that can cross processes. Inner keys are values of the metric's own label ("" without one)."""

    labels: dict[str, str]
    counters: dict[str, dict[str, float]]
    gauges: dict[str, dict[str, float]]
    histograms: dict[str, HistogramTotals]
    #: labels of each info; none until they are known
    infos: dict[str, dict[str, str]]


class Accumulator:
    """Counts the metrics whose identity labels are those of `labels`, with the declared `tenants` as values of their
    label. An unknown name or label value is a KeyError: the sets are closed, so that nothing from outside can make a
    series."""

    def __init__(self, labels: dict[str, str], tenants: Collection[str] = ()) -> None:
        metrics = counted_by(tuple(labels))
        assert metrics, f"no metric has the identity labels {tuple(labels)}"
        self._labels = dict(labels)
        self._counters = _zeros(metrics, MetricKind.COUNTER, tenants)
        self._gauges = _zeros(metrics, MetricKind.GAUGE, tenants)
        histograms = [metric for metric in metrics if metric.kind is MetricKind.HISTOGRAM]
        self._bounds = {metric.name: metric.buckets for metric in histograms}
        self._counts = {metric.name: [0] * (len(metric.buckets) + 1) for metric in histograms}
        self._sums = {metric.name: 0.0 for metric in histograms}
        infos = [metric for metric in metrics if metric.kind is MetricKind.INFO]
        self._info_labels = {metric.name: metric.info_labels for metric in infos}
        self._infos: dict[str, dict[str, str]] = {metric.name: {} for metric in infos}

    def inc(self, name: str, amount: float = 1.0, label_value: str = "") -> None:
        assert amount >= 0, f"counter {name} cannot go down by {amount}"
        self._counters[name][label_value] += amount

    def set(self, name: str, value: float, label_value: str = "") -> None:
        series = self._gauges[name]
        if label_value not in series:
            raise KeyError(f"{name} has no label value {label_value!r}")
        series[label_value] = value

    def observe(self, name: str, value: float) -> None:
        self._counts[name][bisect_left(self._bounds[name], value)] += 1
        self._sums[name] += value

    def tell(self, name: str, values: Mapping[str, str]) -> None:
        """The labels of an info, all of them."""
        if set(values) != set(self._info_labels[name]):
            raise KeyError(f"{name} has the labels {self._info_labels[name]}, not {tuple(values)}")
        self._infos[name] = {label: values[label] for label in self._info_labels[name]}

    def snapshot(self) -> Snapshot:
        """Copies, so that counting on does not change what was handed out."""
        return {
            "labels": dict(self._labels),
            "counters": {name: dict(series) for name, series in self._counters.items()},
            "gauges": {name: dict(series) for name, series in self._gauges.items()},
            "histograms": {
                name: {"counts": list(counts), "sum": self._sums[name]} for name, counts in self._counts.items()
            },
            "infos": {name: dict(labels) for name, labels in self._infos.items()},
        }


def _zeros(metrics: list[Metric], kind: MetricKind, tenants: Collection[str]) -> dict[str, dict[str, float]]:
    return {
        metric.name: dict.fromkeys((*(tenants if metric.label == TENANT else ()), *metric.label_values), 0.0)
        for metric in metrics
        if metric.kind is kind
    }
