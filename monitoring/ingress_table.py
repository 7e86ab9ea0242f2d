"""What is known of requests: their ends, tokens, latencies, refusals and tenants."""

from monitoring.metric import INGRESS, OTHER_TENANT, PHASES, REJECTION_REASONS, TENANT, counter, histogram, info

_LENGTH_BUCKETS = (
    *(1.0, 4.0, 16.0, 64.0, 128.0, 256.0, 512.0, 1024.0, 2048.0, 4096.0, 8192.0, 16384.0),
    *(32768.0, 65536.0, 131072.0),
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
_REQUEST_PHASE_BUCKETS_S = (0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
_PARTS = {phase: phase for phase in PHASES} | {"preempted": "preempted or swapped"}

INGRESS_METRICS = (
    counter(
        "stallfree_prompt_tokens_total",
        "Prompt tokens of ended requests, each request's prompt once, as in usage.prompt_tokens",
        INGRESS,
    ),
    counter(
        "stallfree_generation_tokens_total",
        "Generated tokens that reached the ingress for clients, as in usage.completion_tokens",
        INGRESS,
    ),
    counter(
        "stallfree_requests_total",
        "Ended requests by finish reason",
        INGRESS,
        "finish_reason",
        "stop",
        "length",
        "abort",
        "error",
    ),
    counter(
        "stallfree_failovers_total",
        "Workers lost to running requests, which then went on elsewhere where they could: its process or engine died, "
        "it gave no sign of life, or it was told to stop and its time was over",
        INGRESS,
        "reason",
        "died",
        "stalled",
        "drained",
    ),
    counter(
        "stallfree_router_choices_total",
        "Requests by why the worker that took them was chosen: for cached blocks of their prompt, for its load, or "
        "since there was no other",
        INGRESS,
        "reason",
        "prefix",
        "load",
        "only",
    ),
    counter(
        "stallfree_rejections_total",
        "Requests that were turned away before their first token, by why",
        INGRESS,
        "reason",
        *REJECTION_REASONS,
    ),
    counter(
        "stallfree_tenant_requests_total",
        "Ended requests by whose they were: a tenant that API keys or --tenant-weights name, or other",
        INGRESS,
        TENANT,
        OTHER_TENANT,
    ),
    counter(
        "stallfree_tenant_prompt_tokens_total", "Their prompt tokens by whose they were", INGRESS, TENANT, OTHER_TENANT
    ),
    counter(
        "stallfree_tenant_generation_tokens_total",
        "Generated tokens that reached the ingress by whose they were",
        INGRESS,
        TENANT,
        OTHER_TENANT,
    ),
    counter(
        "stallfree_tenant_rejections_total",
        "Requests that were turned away before their first token by whose they were",
        INGRESS,
        TENANT,
        OTHER_TENANT,
    ),
    histogram(
        "stallfree_time_to_first_token_seconds",
        "From a request's arrival to its first token's way out",
        INGRESS,
        _FIRST_TOKEN_BUCKETS_S,
    ),
    histogram(
        "stallfree_inter_token_latency_seconds",
        "Between two deliveries of tokens of one answer",
        INGRESS,
        _INTER_TOKEN_BUCKETS_S,
    ),
    histogram(
        "stallfree_e2e_request_latency_seconds",
        "From arrival to the end of requests that ended by stop or length",
        INGRESS,
        _REQUEST_BUCKETS_S,
    ),
    histogram(
        "stallfree_request_time_per_output_token_seconds",
        "Of requests that ended by stop or length: from the first token to the end, for each further token",
        INGRESS,
        _INTER_TOKEN_BUCKETS_S,
    ),
    histogram("stallfree_request_prompt_tokens", "Prompt tokens of each ended request", INGRESS, _LENGTH_BUCKETS),
    histogram(
        "stallfree_request_generation_tokens",
        "Generated tokens of each ended request, of all its answers",
        INGRESS,
        _LENGTH_BUCKETS,
    ),
    *(
        histogram(
            f"stallfree_request_{phase}_seconds",
            f"Of each request that a worker took, the part of its time that explain calls {_PARTS[phase]}",
            INGRESS,
            _REQUEST_PHASE_BUCKETS_S,
        )
        for phase in PHASES
    ),
    info("stallfree_build_info", "What the HTTP API runs", INGRESS, "version", "python", "ray"),
)
