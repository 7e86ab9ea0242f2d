"""What the dashboard shows of the workers as they are now, read from the metrics store.

Owns which series are shown and by what name. Knows neither the page nor HTTP.
"""

from typing import TypedDict

from monitoring.metrics_store import MetricsStore, Series

#: shown name → gauge and its own label's value
_GAUGES = {
    "num_waiting": ("stallfree_num_requests_waiting", ""),
    "num_running": ("stallfree_num_requests_running", ""),
    "num_swapped": ("stallfree_num_requests_swapped", ""),
    "num_blocks_used": ("stallfree_kv_blocks_used", "device"),
    "num_blocks_cached": ("stallfree_kv_blocks_cached", ""),
    "num_blocks": ("stallfree_kv_blocks", "device"),
    "num_host_blocks_used": ("stallfree_kv_blocks_used", "host"),
    "num_host_blocks": ("stallfree_kv_blocks", "host"),
    "budget": ("stallfree_step_token_budget", ""),
    "target_itl_ms": ("stallfree_live_option", "target_itl_ms"),
}
#: shown name → a worker's counter; all values of its label are added
_COUNTERS = {"num_preemptions": "stallfree_preemptions_total"}
#: shown name → an ingress's counter
_TOTALS = {
    "prompt_tokens": "stallfree_prompt_tokens_total",
    "generation_tokens": "stallfree_generation_tokens_total",
    "requests": "stallfree_requests_total",
    "rejections": "stallfree_rejections_total",
    "failovers": "stallfree_failovers_total",
}


class WorkerView(TypedDict):
    """`worker` is its rank. `values` is empty while nobody of that rank reports."""

    worker: str
    model: str
    is_up: bool
    values: dict[str, float]


class NowView(TypedDict):
    workers: list[WorkerView]
    totals: dict[str, float]


def now_view(store: MetricsStore) -> NowView:
    """Workers that are there or are missed, by rank; totals of all ingress replicas since the application began."""
    series = store.series()
    workers = [_worker(one) for one in series if "worker" in dict(one.labels) and one.is_up is not None]
    workers.sort(key=lambda view: (view["model"], int(view["worker"])))
    ingress = [one for one in series if "worker" not in dict(one.labels)]
    totals = {name: sum(_counter(one, metric) for one in ingress) for name, metric in _TOTALS.items()}
    return {"workers": workers, "totals": totals}


def _worker(series: Series) -> WorkerView:
    labels = dict(series.labels)
    gauges = series.gauges
    values: dict[str, float] = {}
    if gauges is not None:
        values = {name: gauges[metric][value] for name, (metric, value) in _GAUGES.items()}
        values |= {name: _counter(series, metric) for name, metric in _COUNTERS.items()}
    return {
        "worker": labels["worker"],
        "model": labels["model"],
        "is_up": bool(series.is_up),
        "values": values,
    }


def _counter(series: Series, metric: str) -> float:
    """Zero for a series of other labels, such as a tenant's."""
    return sum(series.totals["counters"].get(metric, {}).values())
