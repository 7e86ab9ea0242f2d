"""The scheduler's dashboard: what steps are made of, who waits for what, who is thrown out."""

from monitoring.grafana.panels import Dashboard, Panel, Query, heatmap
from monitoring.grafana.queries import MODEL, OF_WORKER, WORKER, buckets, quantiles, rate, ratio

_BUDGET = rate("stallfree_budget_tokens_total", OF_WORKER)
_SCHEDULED = "stallfree_scheduled_tokens_total"
_CHUNKS = "stallfree_prefill_chunk_tokens"


def _share_of_budget(kind: str) -> str:
    return ratio(rate(_SCHEDULED, f'{OF_WORKER}, kind="{kind}"'), _BUDGET)


_STEPS = (
    Panel(
        "Use of the token budget",
        "Of what steps could have run: tokens of running answers and of prompts; the rest to 100% is idle.",
        (Query(_share_of_budget("decode"), "answers"), Query(_share_of_budget("prefill"), "prompts")),
        unit="percentunit",
        is_stacked=True,
        maximum=1.0,
    ),
    Panel(
        "Steps by what they ran",
        "A second.",
        (Query(rate("stallfree_steps_total", OF_WORKER, "kind"), "{{kind}}"),),
        is_stacked=True,
    ),
    Panel(
        "Mean step by what it ran",
        "What running answers wait for: a mixed step is as long as its prompts make it.",
        (
            Query(
                ratio(
                    rate("stallfree_step_kind_seconds_total", OF_WORKER, "kind"),
                    rate("stallfree_steps_total", OF_WORKER, "kind"),
                ),
                "{{kind}}",
            ),
        ),
        unit="s",
    ),
    Panel("Step time", "Of all steps.", quantiles("stallfree_step_seconds", OF_WORKER), unit="s"),
    heatmap("Steps by time", "A second.", buckets("stallfree_step_seconds", OF_WORKER), "s"),
    heatmap("Steps by tokens", "A second.", buckets("stallfree_step_tokens", OF_WORKER), "short"),
)

_PROMPTS = (
    heatmap("Prefill chunks by tokens", "A second.", buckets(_CHUNKS, OF_WORKER), "short"),
    Panel("Prefill chunk size", "In tokens.", quantiles(_CHUNKS, OF_WORKER)),
    Panel(
        "Chunks that leave a rest",
        "Share of chunks that left a part of their prompt to later steps.",
        (
            Query(
                ratio(
                    rate("stallfree_partial_prefill_chunks_total", OF_WORKER), rate(f"{_CHUNKS}_count", OF_WORKER)
                ),
                "share",
            ),
        ),
        unit="percentunit",
        maximum=1.0,
    ),
    Panel(
        "Why the first in the queue waits",
        "Steps a second in which it was not admitted.",
        (Query(f'{rate("stallfree_blocked_steps_total", OF_WORKER, "reason")} > 0', "{{reason}}"),),
        is_stacked=True,
        needs="a queue",
    ),
    Panel(
        "Why the first swapped one waits",
        "Steps a second in which it did not come back.",
        (Query(f'{rate("stallfree_blocked_swapped_steps_total", OF_WORKER, "reason")} > 0', "{{reason}}"),),
        is_stacked=True,
        needs="a preemption by swap",
    ),
    Panel(
        "Prefix cache",
        "Blocks a second of admitted prompts.",
        (
            Query(rate("stallfree_prefix_cache_queries_total", OF_WORKER), "looked for"),
            Query(rate("stallfree_prefix_cache_hits_total", OF_WORKER), "found"),
        ),
    ),
)

_PREEMPTION = (
    Panel(
        "Preemptions by mode",
        "Computed again, or moved to the host.",
        (Query(rate("stallfree_preemptions_total", OF_WORKER, "mode"), "{{mode}}"),),
        is_stacked=True,
    ),
    Panel(
        "Preemptions by reason",
        "For what the request had to make room.",
        (Query(rate("stallfree_preemption_reasons_total", OF_WORKER, "reason"), "{{reason}}"),),
        is_stacked=True,
    ),
    Panel(
        "Discarded tokens",
        "Computed, thrown away, and to be computed again.",
        (Query(rate("stallfree_discarded_tokens_total", OF_WORKER), "tokens"),),
    ),
    Panel(
        "Swapped bytes",
        "Between device and host.",
        (Query(rate("stallfree_swap_bytes_total", OF_WORKER, "direction"), "{{direction}}"),),
        unit="Bps",
    ),
    Panel(
        "Swapped blocks",
        "Between device and host.",
        (Query(rate("stallfree_swapped_blocks_total", OF_WORKER, "direction"), "{{direction}}"),),
    ),
    Panel(
        "Time for moving blocks",
        "Share of the time in which steps waited for it.",
        (Query(f"avg (rate(stallfree_swap_seconds_total{{{OF_WORKER}}}[$__rate_interval]))", "share"),),
        unit="percentunit",
    ),
)

_GOVERNOR = (
    Panel(
        "Token budget",
        "Of the newest step, beside the option: with --target-itl-ms less than that while answers run.",
        (
            Query(f"stallfree_step_token_budget{{{OF_WORKER}}}", "step {{worker}}"),
            Query(f'stallfree_live_option{{{OF_WORKER}, option="max_num_batched_tokens"}}', "option {{worker}}"),
        ),
    ),
    Panel(
        "Governor's margin",
        "What it keeps for noise: the target is so many times what a step is foreseen to take. 0 without a target.",
        (Query(f"stallfree_governor_margin{{{OF_WORKER}}}", "{{worker}}"),),
    ),
    Panel(
        "Steps over --target-itl-ms",
        "Share of steps.",
        (
            Query(
                ratio(
                    rate("stallfree_itl_target_violations_total", OF_WORKER),
                    rate("stallfree_step_seconds_count", OF_WORKER),
                ),
                "share",
            ),
        ),
        unit="percentunit",
    ),
)

SCHEDULING = Dashboard(
    "stallfree-scheduling",
    "Stallfree: scheduling",
    "What steps are made of, who waits for what, who is thrown out.",
    (MODEL, WORKER),
    (("Steps", _STEPS), ("Prompts and queues", _PROMPTS), ("Preemption", _PREEMPTION), ("Governor", _GOVERNOR)),
)
