"""The operators' dashboard: is it well, are clients content, and if not, where to look."""

from monitoring.grafana.panels import Dashboard, Panel, Query, heatmap, stat, table
from monitoring.grafana.queries import MODEL, OF_MODEL, buckets, quantile, quantiles, rate, ratio, total
from monitoring.metric import PHASES

_FIRST_TOKEN = "stallfree_time_to_first_token_seconds"
_INTER_TOKEN = "stallfree_inter_token_latency_seconds"
_END_TO_END = "stallfree_e2e_request_latency_seconds"

_NOW = (
    stat("Workers up", "That report.", f"sum(stallfree_worker_up{{{OF_MODEL}}})"),
    stat(
        "Workers down",
        "Silent for more than 5 s without having said goodbye.",
        f"count(stallfree_worker_up{{{OF_MODEL}}}) - sum(stallfree_worker_up{{{OF_MODEL}}})",
    ),
    stat("Running", "Requests that hold device blocks.", total("stallfree_num_requests_running", OF_MODEL)),
    stat("Waiting", "Requests that have not been admitted.", total("stallfree_num_requests_waiting", OF_MODEL)),
    stat("Ended", "Requests a second.", rate("stallfree_requests_total", OF_MODEL), "reqps"),
    stat("Generated", "Tokens a second.", rate("stallfree_generation_tokens_total", OF_MODEL), "short"),
    stat("First token, p95", "From arrival.", quantile(0.95, _FIRST_TOKEN, OF_MODEL), "s"),
    stat("Between tokens, p99", "As their readers saw it.", quantile(0.99, _INTER_TOKEN, OF_MODEL), "s"),
)

_LATENCY = (
    Panel("Time to first token", "From a request's arrival.", quantiles(_FIRST_TOKEN, OF_MODEL), unit="s"),
    Panel("Time between tokens", "Gaps within an answer.", quantiles(_INTER_TOKEN, OF_MODEL), unit="s"),
    Panel("End to end", "Of whole answers.", quantiles(_END_TO_END, OF_MODEL), unit="s"),
    heatmap("First tokens", "Requests a second by time to first token.", buckets(_FIRST_TOKEN, OF_MODEL), "s"),
    heatmap("Gaps", "Gaps a second by their length.", buckets(_INTER_TOKEN, OF_MODEL), "s"),
    Panel(
        "Time for each further token",
        "Of each whole answer: from its first token to its end.",
        quantiles("stallfree_request_time_per_output_token_seconds", OF_MODEL),
        unit="s",
    ),
    Panel(
        "Where requests' time goes",
        "Seconds of each phase for each second, of requests that ended: what explain says of one, summed over all.",
        tuple(Query(rate(f"stallfree_request_{phase}_seconds_sum", OF_MODEL), phase) for phase in PHASES),
        unit="s",
        is_stacked=True,
    ),
)

_TRAFFIC = (
    Panel(
        "Requests held",
        "Waiting, running and swapped out, over all workers.",
        (
            Query(total("stallfree_num_requests_running", OF_MODEL), "running"),
            Query(total("stallfree_num_requests_waiting", OF_MODEL), "waiting"),
            Query(total("stallfree_num_requests_swapped", OF_MODEL), "swapped"),
        ),
        is_stacked=True,
    ),
    Panel(
        "Ended requests",
        "By finish reason.",
        (Query(rate("stallfree_requests_total", OF_MODEL, "finish_reason"), "{{finish_reason}}"),),
        unit="reqps",
        is_stacked=True,
    ),
    Panel(
        "Tokens",
        "As clients are told in usage.",
        (
            Query(rate("stallfree_prompt_tokens_total", OF_MODEL), "prompt"),
            Query(rate("stallfree_generation_tokens_total", OF_MODEL), "generated"),
        ),
    ),
    heatmap("Prompt lengths", "In tokens.", buckets("stallfree_request_prompt_tokens", OF_MODEL), "short"),
    heatmap("Answer lengths", "In tokens.", buckets("stallfree_request_generation_tokens", OF_MODEL), "short"),
    Panel(
        "KV cache in use",
        "Share of the device's blocks that requests hold, by worker.",
        (
            Query(
                f'stallfree_kv_blocks_used{{{OF_MODEL}, pool="device"}} / '
                f'(stallfree_kv_blocks{{{OF_MODEL}, pool="device"}} - 1)',
                "{{model}} {{worker}}",
            ),
        ),
        unit="percentunit",
        maximum=1.0,
    ),
)

_TROUBLE = (
    Panel(
        "Turned away",
        "Before their first token, by why.",
        (Query(rate("stallfree_rejections_total", OF_MODEL, "reason"), "{{reason}}"),),
        unit="reqps",
        is_stacked=True,
    ),
    Panel(
        "Failovers",
        "Workers lost to running requests, which went on elsewhere.",
        (Query(rate("stallfree_failovers_total", OF_MODEL, "reason"), "{{reason}}"),),
        is_stacked=True,
    ),
    Panel(
        "Preemptions",
        "Requests that lost their place for a while.",
        (Query(rate("stallfree_preemptions_total", OF_MODEL, "mode"), "{{mode}}"),),
        is_stacked=True,
    ),
    Panel(
        "Router's choices",
        "Why the worker that took a request was chosen.",
        (Query(rate("stallfree_router_choices_total", OF_MODEL, "reason"), "{{reason}}"),),
        unit="reqps",
        is_stacked=True,
    ),
    Panel(
        "Prefix cache hits",
        "Share of the looked-for blocks.",
        (
            Query(
                ratio(
                    rate("stallfree_prefix_cache_hits_total", OF_MODEL),
                    rate("stallfree_prefix_cache_queries_total", OF_MODEL),
                ),
                "hits",
            ),
        ),
        unit="percentunit",
        maximum=1.0,
    ),
    Panel(
        "Demand, in workers",
        "What is asked, as shares of what a worker sustains; the autoscaler keeps the greater at 0.8 of the workers.",
        (
            Query(total("stallfree_scaling_demand", OF_MODEL, "resource"), "{{resource}}"),
            Query(f"sum(stallfree_worker_up{{{OF_MODEL}}})", "workers"),
        ),
    ),
    table("Build", "What serves the HTTP API.", f"stallfree_build_info{{{OF_MODEL}}}"),
)

OVERVIEW = Dashboard(
    "stallfree-overview",
    "Stallfree: overview",
    "Is it well, and are clients content.",
    (MODEL,),
    (("Now", _NOW), ("Latency", _LATENCY), ("Traffic", _TRAFFIC), ("Trouble", _TROUBLE)),
)
