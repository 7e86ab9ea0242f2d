"""Panels and dashboards as Grafana's JSON. Owns their looks and their places; knows no metric."""

from dataclasses import dataclass
from typing import Any

Json = dict[str, Any]

#: Grafana's grid
_GRID_WIDTH = 24
_HEIGHT = 8
_STAT_HEIGHT = 4
_SCHEMA_VERSION = 41
_DATASOURCE: Json = {"type": "prometheus", "uid": "${datasource}"}


@dataclass(frozen=True, slots=True)
class Query:
    """`legend` may hold labels in double braces."""

    expr: str
    legend: str = ""


@dataclass(frozen=True, slots=True)
class Panel:
    """`unit` is one of Grafana's. `needs`: the event without which the panel is empty; "" shows data whenever there is
    load. `maximum`: of the axis."""

    title: str
    description: str
    queries: tuple[Query, ...]
    kind: str = "timeseries"
    unit: str = "short"
    width: int = 8
    height: int = _HEIGHT
    is_stacked: bool = False
    maximum: float | None = None
    needs: str = ""


@dataclass(frozen=True, slots=True)
class Variable:
    """Values of `label` of a metric, of which any number can be chosen."""

    name: str
    metric: str
    label: str


@dataclass(frozen=True, slots=True)
class Dashboard:
    """`rows` are titles with the panels below them."""

    uid: str
    title: str
    description: str
    variables: tuple[Variable, ...]
    rows: tuple[tuple[str, tuple[Panel, ...]], ...]

    @property
    def panels(self) -> list[Panel]:
        return [panel for _, panels in self.rows for panel in panels]

    def to_json(self) -> Json:
        return {
            "uid": self.uid,
            "title": self.title,
            "description": self.description,
            "tags": ["stallfree"],
            "schemaVersion": _SCHEMA_VERSION,
            "editable": True,
            "graphTooltip": 1,
            "refresh": "10s",
            "time": {"from": "now-30m", "to": "now"},
            "timezone": "browser",
            "templating": {"list": [_datasource_variable(), *(_variable(each) for each in self.variables)]},
            "links": [_other_dashboards()],
            "panels": _placed(self.rows),
        }


def stat(title: str, description: str, expr: str, unit: str = "short", width: int = 3) -> Panel:
    """One number, the newest."""
    return Panel(title, description, (Query(expr),), "stat", unit, width, _STAT_HEIGHT)


def heatmap(title: str, description: str, bucket_rates: str, unit: str) -> Panel:
    """`bucket_rates`: a rate of buckets, summed by `le`."""
    return Panel(title, description, (Query(bucket_rates, "{{le}}"),), "heatmap", unit)


def table(title: str, description: str, expr: str, width: int = _GRID_WIDTH) -> Panel:
    """The labels of a query's series as rows."""
    return Panel(title, description, (Query(expr),), "table", "short", width)


def _placed(rows: tuple[tuple[str, tuple[Panel, ...]], ...]) -> list[Json]:
    """From left to right, and on a new line where a panel has no room."""
    placed: list[Json] = []
    top = 0
    for title, panels in rows:
        placed.append(_row(title, len(placed) + 1, top))
        top += 1
        left = line_height = 0
        for panel in panels:
            if left + panel.width > _GRID_WIDTH:
                top, left, line_height = top + line_height, 0, 0
            position = {"x": left, "y": top, "w": panel.width, "h": panel.height}
            placed.append(_panel(panel, len(placed) + 1, position))
            left, line_height = left + panel.width, max(line_height, panel.height)
        top += line_height
    return placed


def _row(title: str, panel_id: int, top: int) -> Json:
    position = {"x": 0, "y": top, "w": _GRID_WIDTH, "h": 1}
    return {"type": "row", "id": panel_id, "title": title, "collapsed": False, "gridPos": position, "panels": []}


def _panel(panel: Panel, panel_id: int, position: Json) -> Json:
    defaults: Json = {"unit": panel.unit}
    if panel.kind == "timeseries":
        defaults |= {"min": 0, "custom": _field_options(panel)}
    if panel.maximum is not None:
        defaults["max"] = panel.maximum
    return {
        "type": panel.kind,
        "id": panel_id,
        "title": panel.title,
        "description": panel.description,
        "datasource": _DATASOURCE,
        "gridPos": position,
        "fieldConfig": {"defaults": defaults, "overrides": []},
        "options": _OPTIONS[panel.kind],
        "targets": [_target(query, panel, chr(ord("A") + number)) for number, query in enumerate(panel.queries)],
        **({"transformations": [_LABELS_ALONE]} if panel.kind == "table" else {}),
    }


def _target(query: Query, panel: Panel, ref_id: str) -> Json:
    is_instant = panel.kind == "table"
    form = {"table": "table", "heatmap": "heatmap"}.get(panel.kind, "time_series")
    return {
        "refId": ref_id,
        "datasource": _DATASOURCE,
        "expr": query.expr,
        "format": form,
        "instant": is_instant,
        "range": not is_instant,
        "editorMode": "code",
        **({"legendFormat": query.legend} if query.legend else {}),
    }


def _field_options(panel: Panel) -> Json:
    stacked = {"fillOpacity": 60, "lineWidth": 0, "stacking": {"mode": "normal", "group": "A"}}
    plain = {"fillOpacity": 5, "lineWidth": 1, "stacking": {"mode": "none", "group": "A"}}
    return {"drawStyle": "line", "showPoints": "never", **(stacked if panel.is_stacked else plain)}


_OPTIONS: dict[str, Json] = {
    "timeseries": {
        "legend": {"displayMode": "list", "placement": "bottom", "showLegend": True, "calcs": []},
        "tooltip": {"mode": "multi", "sort": "desc"},
    },
    "stat": {
        "colorMode": "none",
        "graphMode": "area",
        "justifyMode": "auto",
        "textMode": "auto",
        "orientation": "auto",
        "wideLayout": True,
        "showPercentChange": False,
        "percentChangeColorMode": "standard",
        "reduceOptions": {"calcs": ["lastNotNull"], "fields": "", "values": False},
    },
    "heatmap": {
        "calculate": False,
        "cellGap": 1,
        "color": {
            "mode": "scheme",
            "scheme": "Oranges",
            "steps": 64,
            "exponent": 0.5,
            "reverse": False,
            "fill": "dark-orange",
        },
        "exemplars": {"color": "rgba(255,0,255,0.7)"},
        "filterValues": {"le": 1e-9},
        "legend": {"show": True},
        "rowsFrame": {"layout": "auto"},
        "showValue": "never",
        "tooltip": {"mode": "single", "yHistogram": False, "showColorScale": False},
        "yAxis": {"axisPlacement": "left", "reverse": False},
    },
    "table": {"showHeader": True, "cellHeight": "sm", "frameIndex": 0},
}
_LABELS_ALONE: Json = {
    "id": "organize",
    "options": {"excludeByName": {"Time": True, "Value": True, "__name__": True, "instance": True, "job": True}},
}


def _datasource_variable() -> Json:
    return {"type": "datasource", "name": "datasource", "label": "data source", "query": "prometheus"}


def _variable(variable: Variable) -> Json:
    return {
        "type": "query",
        "name": variable.name,
        "label": variable.name,
        "datasource": _DATASOURCE,
        "query": f"label_values({variable.metric}, {variable.label})",
        "refresh": 2,
        "sort": 3,
        "multi": True,
        "includeAll": True,
        "allValue": ".*",
        "current": {"selected": True, "text": ["All"], "value": ["$__all"]},
    }


def _other_dashboards() -> Json:
    return {
        "title": "Stallfree",
        "type": "dashboards",
        "tags": ["stallfree"],
        "asDropdown": False,
        "icon": "external link",
        "tooltip": "",
        "url": "",
        "targetBlank": False,
        "includeVars": True,
        "keepTime": True,
    }
