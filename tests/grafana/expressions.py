"""PromQL as the dashboards and rules have it: which metrics and labels it names."""

import re

from monitoring.grafana.build import DASHBOARDS
from monitoring.table import METRICS, MetricKind

#: as Grafana would fill them in for everything
_VARIABLES = {"$model": ".*", "$worker": ".*", "$tenant": ".*", "$__rate_interval": "{interval}"}
_SUFFIXES = ("_bucket", "_sum", "_count")


def filled_in(expr: str, interval: str = "1m") -> str:
    for name, value in _VARIABLES.items():
        expr = expr.replace(name, value.format(interval=interval))
    assert "$" not in expr, expr
    return expr


def panel_expressions() -> dict[str, str]:
    """By dashboard and panel, with everything chosen."""
    return {
        f"{dashboard.uid} / {panel.title} / {number}": filled_in(query.expr)
        for dashboard in DASHBOARDS
        for panel in dashboard.panels
        for number, query in enumerate(panel.queries)
    }


def metrics_in(expr: str) -> set[str]:
    """Our own, histograms by their names without suffix. KeyError for one that does not exist."""
    return {_own_name(name) for name in re.findall(r"\bstallfree_[a-z0-9_]+", expr)}


def _own_name(name: str) -> str:
    if name in METRICS:
        return name
    for suffix in _SUFFIXES:
        metric = METRICS.get(name.removesuffix(suffix))
        if name.endswith(suffix) and metric is not None and metric.kind is MetricKind.HISTOGRAM:
            return metric.name
    raise KeyError(name)


def unknown_labels(expr: str) -> set[str]:
    """Labels in selections and groupings that none of the expression's metrics has."""
    known = {"le"} | {
        label
        for name in metrics_in(expr)
        for label in (*METRICS[name].identity, METRICS[name].label, *METRICS[name].info_labels)
        if label is not None
    }
    selected = {label for part in re.findall(r"\{([^}]*)\}", expr) for label in re.findall(r"(\w+)\s*=", part)}
    grouped = {label for part in re.findall(r"\bby \(([^)]*)\)", expr) for label in re.findall(r"\w+", part)}
    return (selected | grouped) - known
