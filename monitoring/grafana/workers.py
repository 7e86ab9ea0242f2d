"""The workers' dashboard: each by itself, beside the others."""

from monitoring.grafana.panels import Dashboard, Panel, Query, table
from monitoring.grafana.queries import MODEL, OF_WORKER, WORKER, quantile, rate

_EACH = "model, worker"
_LEGEND = "{{model}} {{worker}}"


def _gauge(title: str, description: str, metric: str, unit: str = "short") -> Panel:
    return Panel(title, description, (Query(f"{metric}{{{OF_WORKER}}}", _LEGEND),), unit=unit)


def _blocks(pool: str) -> tuple[Query, ...]:
    selection = f'{OF_WORKER}, pool="{pool}"'
    return (
        Query(f"stallfree_kv_blocks_used{{{selection}}}", f"held {_LEGEND}"),
        Query(f"stallfree_kv_blocks{{{selection}}}", f"all {_LEGEND}"),
    )


_REQUESTS = (
    _gauge("Up", "1 while it reports, 0 once it is silent.", "stallfree_worker_up"),
    _gauge("Running", "Requests that hold device blocks.", "stallfree_num_requests_running"),
    _gauge("Waiting", "Requests that have not been admitted.", "stallfree_num_requests_waiting"),
    _gauge("Swapped", "Requests whose blocks are in host memory.", "stallfree_num_requests_swapped"),
    Panel(
        "Demand",
        "What is asked of it, as a share of what it sustains.",
        (Query(f"stallfree_scaling_demand{{{OF_WORKER}}}", f"{{{{resource}}}} {_LEGEND}"),),
    ),
    _gauge("Refused user_config", "1 while the newest one does not hold.", "stallfree_user_config_refused"),
)

_WORK = (
    Panel(
        "Steps",
        "A second.",
        (Query(rate("stallfree_step_seconds_count", OF_WORKER, _EACH), _LEGEND),),
    ),
    Panel(
        "Step time, p99",
        "Of all steps.",
        (Query(quantile(0.99, "stallfree_step_seconds", OF_WORKER, _EACH), _LEGEND),),
        unit="s",
    ),
    Panel(
        "Scheduled tokens",
        "Of prompts and of running answers, a second.",
        (Query(rate("stallfree_scheduled_tokens_total", OF_WORKER, f"{_EACH}, kind"), f"{{{{kind}}}} {_LEGEND}"),),
    ),
    Panel("Device blocks", "Of the KV cache.", _blocks("device")),
    _gauge("Cached blocks", "Free ones that the prefix cache can still give back.", "stallfree_kv_blocks_cached"),
    Panel("Host blocks", "For swapped requests.", _blocks("host")),
)

_OPTIONS = (
    table("What they run", "The build, and options as they were given.", f"stallfree_worker_info{{{OF_WORKER}}}"),
    Panel(
        "Live options",
        "As they hold now; 0 is off.",
        (Query(f"stallfree_live_option{{{OF_WORKER}}}", f"{{{{option}}}} {_LEGEND}"),),
        width=24,
    ),
)

WORKERS = Dashboard(
    "stallfree-workers",
    "Stallfree: workers",
    "Each worker by itself, beside the others.",
    (MODEL, WORKER),
    (("Requests", _REQUESTS), ("Work and memory", _WORK), ("Options", _OPTIONS)),
)
