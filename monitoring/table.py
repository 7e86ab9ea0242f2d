"""Every metric once: name, type, help, labels, buckets. Knows neither who counts nor how series are stored.

`identity` names the labels that tell one source's series from another's: `model` on the ingress's series,
`model` and `worker` (the replica's rank) on the workers'. `label` is the one further label, whose values are
closed and start at zero, so that a rate exists from the first scrape on. The values of `TENANT` are those tenants that
the operator declared, and `other`. No label ever carries a value that a client chose.
"""

from dataclasses import dataclass
from enum import Enum


class MetricKind(Enum):
    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


INGRESS = ("model",)
#: options that may change while a worker runs
LIVE_OPTIONS = (
    *("max_num_batched_tokens", "max_num_seqs", "target_itl_ms"),
    *("max_queued_tokens", "max_queued_requests"),
)
#: why a request was turned away
REJECTION_REASONS = (
    *("queue_full", "open_requests", "draining", "unavailable"),
    *("deadline", "too_long", "refused"),
)
WORKER = ("model", "worker")
#: the one label whose values the operator declares, beside those in the table
TENANT = "tenant"
#: everybody that is not declared
OTHER_TENANT = "other"

_TOKEN_BUCKETS = (1.0, 4.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0, 1024.0, 2048.0, 4096.0, 8192.0, 16384.0)
_STEP_BUCKETS_S = (
    *(0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5),
    *(1.0, 2.5, 5.0, 10.0, 30.0),
)
_FIRST_TOKEN_BUCKETS_S = (
    *(0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 0.75, 1.0, 1.5, 2.5, 5.0),
    *(10.0, 20.0, 30.0, 60.0, 120.0),
)
_INTER_TOKEN_BUCKETS_S = (
    *(0.001, 0.0025, 0.005, 0.01, 0.015, 0.02, 0.03, 0.04, 0.05, 0.075),
    *(0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1.0, 2.5, 5.0, 10.0),
)
_REQUEST_BUCKETS_S = (
    *(0.05, 0.1, 0.25, 0.5, 1.0, 1.5, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 60.0),
    *(120.0, 300.0, 600.0),
)


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric. A counter's `name` ends in `_total`; `buckets` are ascending upper bounds without +Inf."""

    name: str
    kind: MetricKind
    help: str
    identity: tuple[str, ...]
    label: str | None = None
    label_values: tuple[str, ...] = ("",)
    buckets: tuple[float, ...] = ()


def _counter(name: str, help: str, identity: tuple[str, ...], label: str | None = None, *values: str) -> Metric:
    return Metric(name, MetricKind.COUNTER, help, identity, label, values or ("",))


def _gauge(name: str, help: str, identity: tuple[str, ...], label: str | None = None, *values: str) -> Metric:
    return Metric(name, MetricKind.GAUGE, help, identity, label, values or ("",))


def _histogram(name: str, help: str, identity: tuple[str, ...], buckets: tuple[float, ...]) -> Metric:
    return Metric(name, MetricKind.HISTOGRAM, help, identity, buckets=buckets)


#: The one series that the store itself makes: it alone sees who has fallen silent.
WORKER_UP = _gauge(
    "stallfree_worker_up",
    "1 while the worker of this rank reports, 0 once it has been silent for 5 s without having said goodbye; a worker "
    "whose engine is stuck in a step reports nothing",
    WORKER,
)

_WORKER_METRICS = (
    _gauge("stallfree_num_requests_waiting", "Requests queued and not yet admitted", WORKER),
    _gauge("stallfree_num_requests_running", "Requests that hold device blocks, decoding or mid-prefill", WORKER),
    _gauge("stallfree_num_requests_swapped", "Requests whose blocks are in host memory", WORKER),
    _gauge(
        "stallfree_kv_blocks_used",
        "KV cache blocks held by requests, cached ones excluded",
        WORKER,
        "pool",
        "device",
        "host",
    ),
    _gauge(
        "stallfree_kv_blocks",
        "KV cache blocks of the pool, held or not, the device's reserved null block included",
        WORKER,
        "pool",
        "device",
        "host",
    ),
    _gauge(
        "stallfree_kv_blocks_cached",
        "Device blocks that no request holds and that the prefix cache can still give back",
        WORKER,
    ),
    _counter(
        "stallfree_prefix_cache_queries_total",
        "KV cache blocks of admitted prompts that were looked for in the prefix cache",
        WORKER,
    ),
    _counter("stallfree_prefix_cache_hits_total", "KV cache blocks that were found there and not computed", WORKER),
    _counter("stallfree_preemptions_total", "Preempted requests", WORKER, "mode", "recompute", "swap"),
    _counter(
        "stallfree_preemption_reasons_total",
        "The same by what for: blocks, a more urgent request, or a swap that found the host pool full",
        WORKER,
        "reason",
        "blocks",
        "priority",
        "host_pool_full",
    ),
    _counter(
        "stallfree_swapped_blocks_total",
        "KV cache blocks moved to the host (out) or back (in)",
        WORKER,
        "direction",
        "in",
        "out",
    ),
    _counter(
        "stallfree_discarded_tokens_total",
        "Computed tokens whose keys and values were thrown away by preemption and are computed again",
        WORKER,
    ),
    _counter(
        "stallfree_itl_target_violations_total",
        "Steps with running answers that took longer than --target-itl-ms",
        WORKER,
    ),
    _gauge(
        "stallfree_step_token_budget",
        "Token budget of the newest step: less than the option where it is governed",
        WORKER,
    ),
    _gauge(
        "stallfree_live_option",
        "The value that holds now of each option that user_config may change; 0 is off",
        WORKER,
        "option",
        *LIVE_OPTIONS,
    ),
    _gauge(
        "stallfree_user_config_refused",
        "1 while the newest user_config is one that this worker refused; the values before it hold",
        WORKER,
    ),
    _gauge(
        "stallfree_scaling_demand",
        "Share of what this worker sustains that is asked of it: prompt tokens that come and that wait, and sequence "
        "slots that requests hold or want; the autoscaler compares the greater of the two sums with 0.5 and 0.8",
        WORKER,
        "resource",
        "tokens",
        "sequences",
    ),
    _histogram("stallfree_prefill_chunk_tokens", "Tokens of each scheduled prefill chunk", WORKER, _TOKEN_BUCKETS),
    _histogram("stallfree_step_tokens", "Tokens batched in each step", WORKER, _TOKEN_BUCKETS),
    _histogram("stallfree_step_seconds", "Duration of each step", WORKER, _STEP_BUCKETS_S),
)

_INGRESS_METRICS = (
    _counter(
        "stallfree_prompt_tokens_total",
        "Prompt tokens of ended requests, each request's prompt once, as in usage.prompt_tokens",
        INGRESS,
    ),
    _counter(
        "stallfree_generation_tokens_total",
        "Generated tokens that reached the ingress for clients, as in usage.completion_tokens",
        INGRESS,
    ),
    _counter(
        "stallfree_requests_total",
        "Ended requests by finish reason",
        INGRESS,
        "finish_reason",
        "stop",
        "length",
        "abort",
        "error",
    ),
    _counter(
        "stallfree_failovers_total",
        "Workers lost to running requests, which then went on elsewhere where they could: its process or engine died, "
        "it gave no sign of life, or it was told to stop and its time was over",
        INGRESS,
        "reason",
        "died",
        "stalled",
        "drained",
    ),
    _counter(
        "stallfree_router_choices_total",
        "Requests by why the worker that took them was chosen: for cached blocks of their prompt, for its load, or "
        "since there was no other",
        INGRESS,
        "reason",
        "prefix",
        "load",
        "only",
    ),
    _counter(
        "stallfree_rejections_total",
        "Requests that were turned away before their first token, by why",
        INGRESS,
        "reason",
        *REJECTION_REASONS,
    ),
    _counter(
        "stallfree_tenant_requests_total",
        "Ended requests by whose they were: a tenant that API keys or --tenant-weights name, or other",
        INGRESS,
        TENANT,
        OTHER_TENANT,
    ),
    _counter(
        "stallfree_tenant_prompt_tokens_total", "Their prompt tokens by whose they were", INGRESS, TENANT, OTHER_TENANT
    ),
    _counter(
        "stallfree_tenant_generation_tokens_total",
        "Generated tokens that reached the ingress by whose they were",
        INGRESS,
        TENANT,
        OTHER_TENANT,
    ),
    _counter(
        "stallfree_tenant_rejections_total",
        "Requests that were turned away before their first token by whose they were",
        INGRESS,
        TENANT,
        OTHER_TENANT,
    ),
    _histogram(
        "stallfree_time_to_first_token_seconds",
        "From a request's arrival to its first token's way out",
        INGRESS,
        _FIRST_TOKEN_BUCKETS_S,
    ),
    _histogram(
        "stallfree_inter_token_latency_seconds",
        "Between two deliveries of tokens of one answer",
        INGRESS,
        _INTER_TOKEN_BUCKETS_S,
    ),
    _histogram(
        "stallfree_e2e_request_latency_seconds",
        "From arrival to the end of requests that ended by stop or length",
        INGRESS,
        _REQUEST_BUCKETS_S,
    ),
)

METRICS: dict[str, Metric] = {metric.name: metric for metric in (WORKER_UP, *_WORKER_METRICS, *_INGRESS_METRICS)}


def counted_by(identity: tuple[str, ...]) -> list[Metric]:
    """The metrics that a source with these identity labels keeps (all but the store's own)."""
    return [metric for metric in METRICS.values() if metric.identity == identity and metric is not WORKER_UP]
