"""PromQL that several dashboards share: selections by their variables, rates, quantiles."""

from monitoring.grafana.panels import Query, Variable

MODEL = Variable("model", "stallfree_requests_total", "model")
WORKER = Variable("worker", 'stallfree_steps_total{model=~"$model"}', "worker")
TENANT = Variable("tenant", 'stallfree_tenant_requests_total{model=~"$model"}', "tenant")

#: label selections
OF_MODEL = 'model=~"$model"'
OF_WORKER = f'{OF_MODEL}, worker=~"$worker"'
OF_TENANT = f'{OF_MODEL}, tenant=~"$tenant"'


def rate(metric: str, selection: str, by: str = "") -> str:
    """Summed over everything but the labels `by`."""
    grouping = f" by ({by})" if by else ""
    return f"sum{grouping} (rate({metric}{{{selection}}}[$__rate_interval]))"


def total(metric: str, selection: str, by: str = "") -> str:
    """Of gauges."""
    grouping = f" by ({by})" if by else ""
    return f"sum{grouping} ({metric}{{{selection}}})"


def quantile(share: float, histogram: str, selection: str, by: str = "") -> str:
    labels = f"le, {by}" if by else "le"
    return f"histogram_quantile({share}, {rate(f'{histogram}_bucket', selection, labels)})"


def quantiles(histogram: str, selection: str) -> tuple[Query, ...]:
    return tuple(Query(quantile(share, histogram, selection), f"p{share * 100:g}") for share in (0.5, 0.95, 0.99))


def ratio(part: str, whole: str) -> str:
    """Nothing where there is nothing to divide by, rather than NaN."""
    return f"{part} / ({whole} > 0)"


def buckets(histogram: str, selection: str) -> str:
    return rate(f"{histogram}_bucket", selection, "le")
