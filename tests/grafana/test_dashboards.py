"""The dashboards: what is built is what lies there, Grafana takes it, and every query asks for metrics that exist."""

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from monitoring.grafana.build import DASHBOARDS, FOLDER, files
from monitoring.table import METRICS
from tests.debian_tools import program
from tests.grafana.expressions import metrics_in, panel_expressions, unknown_labels
from tests.grafana.grafana_schema import schema_faults

NOT_SHOWN = {
    # the same in other words as metrics that are shown
    *("stallfree_prefix_cache_query_tokens_total", "stallfree_prefix_cache_hit_tokens_total"),
    # of no model, and there only with an autoscaler; demand and workers are shown as workers tell them
    *("stallfree_scaling_workers", "stallfree_scaling_seen_demand"),
    # measured once, at start, and many times what is ever swapped in a second
    "stallfree_swap_bytes_per_second",
}


@pytest.mark.parametrize("dashboard", DASHBOARDS, ids=lambda dashboard: dashboard.uid)
def test_grafanas_schema_knows_every_field_and_value(dashboard: Any) -> None:
    assert schema_faults(dashboard.to_json()) == []


def plant_in_panel(key: str, value: object) -> Callable[[dict[str, Any]], None]:
    return lambda dashboard: dashboard["panels"][1].__setitem__(key, value)


@pytest.mark.parametrize(
    ("plant", "fault"),
    [
        (lambda dashboard: dashboard.__setitem__("colour", "red"), ".colour: unknown field"),
        (lambda dashboard: dashboard.__setitem__("refresh", 10), ".refresh"),
        (plant_in_panel("gridPos", {"x": "left", "y": 0, "w": 1, "h": 1}), ".panels[1].grid_pos.x"),
        (plant_in_panel("options", {"graphMode": "pie"}), ".panels[1].options.graph_mode"),
        (plant_in_panel("targets", [{"refId": "A", "expr": 5, "datasource": {}}]), ".panels[1].targets[0].expr"),
        (plant_in_panel("transformations", [{"id": "organize", "why": 1}]), ".panels[1].transformations[0].why"),
        (lambda dashboard: dashboard["templating"]["list"][1].__setitem__("type", "guess"), ".templating.list_val[1]"),
    ],
)
def test_a_fault_in_a_dashboard_is_found(plant: Callable[[dict[str, Any]], None], fault: str) -> None:
    dashboard = json.loads(json.dumps(DASHBOARDS[0].to_json()))
    plant(dashboard)
    assert any(fault in found for found in schema_faults(dashboard)), schema_faults(dashboard)


def test_the_files_are_what_the_module_builds() -> None:
    """`python -m monitoring.grafana.build` writes them."""
    assert {path.name: path.read_text() for path in FOLDER.glob("*.json")} == files()


def test_panels_have_ids_of_their_own_and_do_not_overlap() -> None:
    for dashboard in DASHBOARDS:
        panels = dashboard.to_json()["panels"]
        assert len({panel["id"] for panel in panels}) == len(panels)
        cells: set[tuple[int, int]] = set()
        for panel in panels:
            at = panel["gridPos"]
            own = {(at["x"] + x, at["y"] + y) for x in range(at["w"]) for y in range(at["h"])}
            assert at["x"] + at["w"] <= 24
            assert not own & cells, f"{dashboard.uid}: {panel['title']}"
            cells |= own


def test_every_dashboard_can_be_narrowed_to_a_data_source_and_a_model() -> None:
    for dashboard in DASHBOARDS:
        variables = [variable["name"] for variable in dashboard.to_json()["templating"]["list"]]
        assert variables[:2] == ["datasource", "model"]
        for panel in dashboard.panels:
            assert all('model=~"$model"' in query.expr for query in panel.queries), panel.title


def test_every_query_names_metrics_and_labels_that_exist() -> None:
    for name, expr in panel_expressions().items():
        assert metrics_in(expr), name
        assert unknown_labels(expr) == set(), name


def test_every_metric_is_on_some_dashboard() -> None:
    shown = {metric for expr in panel_expressions().values() for metric in metrics_in(expr)}
    assert set(METRICS) - shown == NOT_SHOWN


def test_prometheus_can_parse_every_query(tmp_path: Path) -> None:
    rules = [{"record": f"q:{number}", "expr": expr} for number, expr in enumerate(panel_expressions().values())]
    path = tmp_path / "rules.yml"
    path.write_text(yaml.safe_dump({"groups": [{"name": "panels", "rules": rules}]}))
    checked = subprocess.run([program("promtool"), "check", "rules", path], capture_output=True, text=True, timeout=60)
    assert checked.returncode == 0, checked.stderr
