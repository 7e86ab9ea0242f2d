"""What is known of each worker: its queues, blocks, steps, chunks, preemptions and swaps."""

from monitoring.metric import LIVE_OPTIONS, WORKER, counter, gauge, histogram, info
from scheduler.records import WaitReason

#: what a step had in it; `none`: it moved blocks alone, or nothing could run
STEP_KINDS = ("prefill", "decode", "mixed", "none")
_WAIT_REASONS = tuple(reason.value for reason in WaitReason)

_TOKEN_BUCKETS = (1.0, 4.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0, 1024.0, 2048.0, 4096.0, 8192.0, 16384.0)
_STEP_BUCKETS_S = (
    *(0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5),
    *(1.0, 2.5, 5.0, 10.0, 30.0),
)

WORKER_METRICS = (
    gauge("stallfree_num_requests_waiting", "Requests queued and not yet admitted", WORKER),
    gauge("stallfree_num_requests_running", "Requests that hold device blocks, decoding or mid-prefill", WORKER),
    gauge("stallfree_num_requests_swapped", "Requests whose blocks are in host memory", WORKER),
    gauge(
        "stallfree_kv_blocks_used",
        "KV cache blocks held by requests, cached ones excluded",
        WORKER,
        "pool",
        "device",
        "host",
    ),
    gauge(
        "stallfree_kv_blocks",
        "KV cache blocks of the pool, held or not, the device's reserved null block included",
        WORKER,
        "pool",
        "device",
        "host",
    ),
    gauge(
        "stallfree_kv_blocks_cached",
        "Device blocks that no request holds and that the prefix cache can still give back",
        WORKER,
    ),
    counter(
        "stallfree_prefix_cache_queries_total",
        "KV cache blocks of admitted prompts that were looked for in the prefix cache",
        WORKER,
    ),
    counter("stallfree_prefix_cache_hits_total", "KV cache blocks that were found there and not computed", WORKER),
    counter(
        "stallfree_prefix_cache_query_tokens_total",
        "Prompt tokens of those looked-for blocks",
        WORKER,
    ),
    counter("stallfree_prefix_cache_hit_tokens_total", "Prompt tokens of those found blocks", WORKER),
    counter("stallfree_preemptions_total", "Preempted requests", WORKER, "mode", "recompute", "swap"),
    counter(
        "stallfree_preemption_reasons_total",
        "The same by what for: blocks, a more urgent request, or a swap that found the host pool full",
        WORKER,
        "reason",
        "blocks",
        "priority",
        "host_pool_full",
    ),
    counter(
        "stallfree_swapped_blocks_total",
        "KV cache blocks moved to the host (out) or back (in)",
        WORKER,
        "direction",
        "in",
        "out",
    ),
    counter("stallfree_swap_bytes_total", "The same in bytes", WORKER, "direction", "in", "out"),
    counter(
        "stallfree_swap_seconds_total",
        "Time that steps waited for blocks to be moved or copied; on CUDA for the order to move them",
        WORKER,
    ),
    gauge(
        "stallfree_swap_bytes_per_second",
        "What a batched copy of KV cache blocks reached at start, the fastest of five, to the host (out) and back "
        "(in); the choice of preemption rests on it",
        WORKER,
        "direction",
        "in",
        "out",
    ),
    counter(
        "stallfree_discarded_tokens_total",
        "Computed tokens whose keys and values were thrown away by preemption; they are computed again, but for those "
        "whose blocks the prefix cache still has then",
        WORKER,
    ),
    counter(
        "stallfree_itl_target_violations_total",
        "Steps with running answers that took longer than --target-itl-ms",
        WORKER,
    ),
    counter(
        "stallfree_steps_total",
        "Steps by what they ran: prompts, running answers, both, or neither",
        WORKER,
        "kind",
        *STEP_KINDS,
    ),
    counter("stallfree_step_kind_seconds_total", "Their durations", WORKER, "kind", *STEP_KINDS),
    counter(
        "stallfree_budget_tokens_total",
        "Token budgets of all steps, as a governor left them: what could have been scheduled",
        WORKER,
    ),
    counter(
        "stallfree_scheduled_tokens_total",
        "Tokens that were scheduled, of prompts and of running answers",
        WORKER,
        "kind",
        "prefill",
        "decode",
    ),
    counter(
        "stallfree_partial_prefill_chunks_total",
        "Prefill chunks that left a part of their prompt to later steps",
        WORKER,
    ),
    counter(
        "stallfree_blocked_steps_total",
        "Steps in which the first waiting request was not admitted, by why",
        WORKER,
        "reason",
        *_WAIT_REASONS,
    ),
    counter(
        "stallfree_blocked_swapped_steps_total",
        "Steps in which the first swapped request did not come back, by why",
        WORKER,
        "reason",
        *_WAIT_REASONS,
    ),
    gauge(
        "stallfree_step_token_budget",
        "Token budget of the newest step: less than the option where it is governed",
        WORKER,
    ),
    gauge(
        "stallfree_governor_margin",
        "What a step may be foreseen to take, as a divisor of --target-itl-ms; 0 without a target",
        WORKER,
    ),
    gauge(
        "stallfree_live_option",
        "The value that holds now of each option that user_config may change; 0 is off",
        WORKER,
        "option",
        *LIVE_OPTIONS,
    ),
    gauge(
        "stallfree_user_config_refused",
        "1 while the newest user_config is one that this worker refused; the values before it hold",
        WORKER,
    ),
    gauge(
        "stallfree_scaling_demand",
        "Share of what this worker sustains that is asked of it: prompt tokens that come and that wait, and sequence "
        "slots that requests hold or want; the autoscaler compares the greater of the two sums with 0.5 and 0.8",
        WORKER,
        "resource",
        "tokens",
        "sequences",
    ),
    histogram("stallfree_prefill_chunk_tokens", "Tokens of each scheduled prefill chunk", WORKER, _TOKEN_BUCKETS),
    histogram("stallfree_step_tokens", "Tokens batched in each step", WORKER, _TOKEN_BUCKETS),
    histogram("stallfree_step_seconds", "Duration of each step", WORKER, _STEP_BUCKETS_S),
    info(
        "stallfree_worker_info",
        "What this worker runs: the build, options as they were given, and the attention backend chosen by them",
        WORKER,
        *("version", "torch", "device", "dtype", "attention_backend", "block_size", "max_model_len"),
        *("scheduler_policy", "queue_policy", "preemption_mode", "prefix_caching"),
    ),
)
