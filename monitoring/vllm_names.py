"""The metrics under vLLM's names, so that dashboards, scalers and routers made for it work unchanged.

Owns names and labels; values are those of our own metrics. Counts nothing.
"""

from collections.abc import Iterable
from dataclasses import replace

from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric as MetricFamily

from monitoring.metric import INGRESS, WORKER, Metric
from monitoring.metrics_store import Series
from monitoring.table import METRICS

_LABEL_NAMES = {INGRESS: ("model_name",), WORKER: ("model_name", "engine")}
_INFO = "stallfree_worker_info"


def _renamed(name: str, vllm_name: str, label: str | None = None) -> tuple[Metric, Metric]:
    metric = METRICS[name]
    shown = replace(metric, name=vllm_name, identity=_LABEL_NAMES[metric.identity], label=label)
    return shown, metric


#: (as it is shown, ours). Without a comment: the name and the meaning of vLLM's present engine.
RENAMED: tuple[tuple[Metric, Metric], ...] = (
    _renamed("stallfree_num_requests_running", "vllm:num_requests_running"),
    _renamed("stallfree_num_requests_waiting", "vllm:num_requests_waiting"),
    # of its first engine, which could swap as ours can
    _renamed("stallfree_num_requests_swapped", "vllm:num_requests_swapped"),
    _renamed("stallfree_prefix_cache_query_tokens_total", "vllm:prefix_cache_queries_total"),
    _renamed("stallfree_prefix_cache_hit_tokens_total", "vllm:prefix_cache_hits_total"),
    _renamed("stallfree_step_tokens", "vllm:iteration_tokens_total"),
    _renamed("stallfree_prompt_tokens_total", "vllm:prompt_tokens_total"),
    _renamed("stallfree_generation_tokens_total", "vllm:generation_tokens_total"),
    _renamed("stallfree_requests_total", "vllm:request_success_total", "finished_reason"),
    _renamed("stallfree_time_to_first_token_seconds", "vllm:time_to_first_token_seconds"),
    _renamed("stallfree_inter_token_latency_seconds", "vllm:inter_token_latency_seconds"),
    # the older name of the same
    _renamed("stallfree_inter_token_latency_seconds", "vllm:time_per_output_token_seconds"),
    _renamed("stallfree_request_time_per_output_token_seconds", "vllm:request_time_per_output_token_seconds"),
    _renamed("stallfree_e2e_request_latency_seconds", "vllm:e2e_request_latency_seconds"),
    _renamed("stallfree_request_queue_seconds", "vllm:request_queue_time_seconds"),
    # shares of their own of the steps; what others added is in neither
    _renamed("stallfree_request_prefill_seconds", "vllm:request_prefill_time_seconds"),
    _renamed("stallfree_request_decode_seconds", "vllm:request_decode_time_seconds"),
    _renamed("stallfree_request_prompt_tokens", "vllm:request_prompt_tokens"),
    _renamed("stallfree_request_generation_tokens", "vllm:request_generation_tokens"),
)


def derived(all_series: list[Series]) -> Iterable[MetricFamily]:
    """What vLLM counts otherwise than we do, made of several of ours."""
    workers = [series for series in all_series if tuple(name for name, _ in series.labels) == WORKER]
    yield _cache_usage(workers)
    yield _preemptions(workers)
    yield _cache_config(workers)


def _cache_usage(workers: list[Series]) -> MetricFamily:
    family = GaugeMetricFamily(
        "vllm:kv_cache_usage_perc",
        "Share of the device's KV cache blocks that requests hold",
        labels=_LABEL_NAMES[WORKER],
    )
    for series in workers:
        if series.gauges is not None and (num_blocks := _usable_blocks(series.gauges)) > 0:
            family.add_metric(_values(series), series.gauges["stallfree_kv_blocks_used"]["device"] / num_blocks)
    return family


def _preemptions(workers: list[Series]) -> MetricFamily:
    family = CounterMetricFamily("vllm:num_preemptions_total", "Preempted requests", labels=_LABEL_NAMES[WORKER])
    for series in workers:
        modes = series.totals["counters"]["stallfree_preemptions_total"]
        family.add_metric(_values(series), sum(modes.values()))
    return family


def _cache_config(workers: list[Series]) -> MetricFamily:
    """Routers read from it how many tokens fit."""
    names = ("block_size", "num_gpu_blocks")
    family = GaugeMetricFamily(
        "vllm:cache_config_info", "The KV cache of each worker", labels=(*_LABEL_NAMES[WORKER], *names)
    )
    for series in workers:
        info = series.infos.get(_INFO)
        if info and series.gauges is not None:
            num_blocks = int(_usable_blocks(series.gauges))
            family.add_metric([*_values(series), info["block_size"], str(num_blocks)], 1.0)
    return family


def _usable_blocks(gauges: dict[str, dict[str, float]]) -> float:
    """The null block is nobody's."""
    return gauges["stallfree_kv_blocks"]["device"] - 1


def _values(series: Series) -> list[str]:
    return [value for _, value in series.labels]
