"""The store's series in Prometheus' text format. Knows the metric table; counts nothing and keeps nothing."""

from collections.abc import Iterable
from itertools import accumulate

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
)
from prometheus_client.metrics_core import Metric as MetricFamily
from prometheus_client.registry import Collector

from monitoring import vllm_names
from monitoring.metrics_store import MetricsStore, Series
from monitoring.table import METRICS, WORKER_UP, Metric, MetricKind


class StoreCollector(Collector):
    """Reads the store once a scrape, so that all series of one answer belong together. `with_vllm_names`: under
    vLLM's names, too."""

    def __init__(self, store: MetricsStore, *, with_vllm_names: bool = False) -> None:
        self._store = store
        self.with_vllm_names = with_vllm_names

    def collect(self) -> Iterable[MetricFamily]:
        series = self._store.series()
        yield from (_family(metric, metric, series) for metric in METRICS.values())
        if self.with_vllm_names:
            yield from (_family(shown, metric, series) for shown, metric in vllm_names.RENAMED)
            yield from vllm_names.derived(series)


def registry_of(collector: StoreCollector) -> CollectorRegistry:
    registry = CollectorRegistry()
    registry.register(collector)
    return registry


def render(registry: CollectorRegistry) -> str:
    return generate_latest(registry).decode()


def _family(shown: Metric, metric: Metric, all_series: list[Series]) -> MetricFamily:
    """The values of `metric` under the name and the labels of `shown`."""
    mine = [series for series in all_series if tuple(name for name, _ in series.labels) == metric.identity]
    if metric.kind is MetricKind.HISTOGRAM:
        return _histogram_family(shown, metric, mine)
    if metric.kind is MetricKind.INFO:
        return _info_family(metric, mine)
    own_label = [shown.label] if shown.label is not None else []
    family_class = CounterMetricFamily if metric.kind is MetricKind.COUNTER else GaugeMetricFamily
    family = family_class(shown.name, shown.help, labels=[*shown.identity, *own_label])
    for series in mine:
        identity = [value for _, value in series.labels]
        for label_value, number in _numbers(metric, series).items():
            family.add_metric([*identity, label_value] if own_label else identity, number)
    return family


def _numbers(metric: Metric, series: Series) -> dict[str, float]:
    if metric is WORKER_UP:
        return {} if series.is_up is None else {"": float(series.is_up)}
    if metric.kind is MetricKind.COUNTER:
        return series.totals["counters"][metric.name]
    return {} if series.gauges is None else series.gauges[metric.name]


def _info_family(metric: Metric, mine: list[Series]) -> GaugeMetricFamily:
    """A gauge of 1: the text format knows no infos."""
    family = GaugeMetricFamily(metric.name, metric.help, labels=[*metric.identity, *metric.info_labels])
    for series in mine:
        labels = series.infos.get(metric.name)
        if labels:
            family.add_metric([*(value for _, value in series.labels), *labels.values()], 1.0)
    return family


def _histogram_family(shown: Metric, metric: Metric, mine: list[Series]) -> HistogramMetricFamily:
    family = HistogramMetricFamily(shown.name, shown.help, labels=shown.identity)
    bounds = [*(str(bound) for bound in metric.buckets), "+Inf"]
    for series in mine:
        totals = series.totals["histograms"][metric.name]
        buckets = list(zip(bounds, accumulate(totals["counts"]), strict=True))
        family.add_metric([value for _, value in series.labels], buckets, totals["sum"])
    return family
