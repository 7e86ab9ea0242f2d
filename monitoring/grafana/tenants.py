"""The tenants' dashboard: who gets what. Tenants that the operator declared have a name, all others are `other`."""

from monitoring.grafana.panels import Dashboard, Panel, Query
from monitoring.grafana.queries import MODEL, OF_MODEL, OF_TENANT, TENANT, rate


def _by_tenant(title: str, description: str, metric: str, unit: str = "short") -> Panel:
    query = Query(rate(metric, OF_TENANT, "tenant"), "{{tenant}}")
    return Panel(title, description, (query,), unit=unit, width=12, is_stacked=True)


def _share(title: str, metric: str) -> Panel:
    expr = f"{rate(metric, OF_TENANT, 'tenant')} / on () group_left () ({rate(metric, OF_MODEL)} > 0)"
    return Panel(
        title,
        "Of all tenants' tokens.",
        (Query(expr, "{{tenant}}"),),
        unit="percentunit",
        width=12,
        is_stacked=True,
        maximum=1.0,
    )


TENANTS = Dashboard(
    "stallfree-tenants",
    "Stallfree: tenants",
    "Who gets what.",
    (MODEL, TENANT),
    (
        (
            "What they get",
            (
                _by_tenant("Generated tokens", "A second.", "stallfree_tenant_generation_tokens_total"),
                _by_tenant("Prompt tokens", "A second.", "stallfree_tenant_prompt_tokens_total"),
                _share("Share of the generated tokens", "stallfree_tenant_generation_tokens_total"),
                _share("Share of the prompt tokens", "stallfree_tenant_prompt_tokens_total"),
            ),
        ),
        (
            "Requests",
            (
                _by_tenant("Ended requests", "A second.", "stallfree_tenant_requests_total", "reqps"),
                _by_tenant(
                    "Turned away", "Before their first token, a second.", "stallfree_tenant_rejections_total", "reqps"
                ),
            ),
        ),
    ),
)
