"""Dashboards and rules in the manifests are those of `monitoring/`, and name metrics that exist."""

import json
import re
from pathlib import Path

import pytest
import yaml

from k8s.build import GENERATED, MONITORING, BuildError, generated_files, write
from monitoring.table import METRICS
from tests.k8s import monitor_rules

DASHBOARD = {"title": "Overview", "panels": []}


def texts_below(folder: Path) -> dict[str, str]:
    return {path.relative_to(folder).as_posix(): path.read_text() for path in folder.rglob("*") if path.is_file()}


def monitoring(folder: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


def rules(*names: str) -> str:
    return yaml.safe_dump({"groups": [{"name": name, "rules": [{"alert": "A", "expr": "up == 0"}]} for name in names]})


def test_the_generated_folder_is_what_its_script_writes() -> None:
    assert texts_below(GENERATED) == generated_files(MONITORING), "run python -m k8s.build"


def test_every_metric_that_a_dashboard_or_a_rule_names_exists() -> None:
    text = "\n".join(texts_below(GENERATED).values())
    named = set(re.findall(r"(?<![\w:])stallfree_\w+(?!\w*:)", text))
    known = set(METRICS) | {f"{name}_{part}" for name in METRICS for part in ("bucket", "sum", "count")}
    assert {name for name in named if name not in known} == set()


def test_each_dashboard_becomes_a_config_map_and_each_rule_file_a_rule(tmp_path: Path) -> None:
    source = monitoring(
        tmp_path / "monitoring",
        {
            "grafana/overview.json": json.dumps(DASHBOARD),
            "grafana/more/per_worker.json": json.dumps(DASHBOARD),
            "grafana/schema.json": "{}",
            "prometheus/alert_rules.yml": rules("levels", "health") + "# the end",
            "prometheus/recording.yaml": rules("levels"),
            "prometheus/prometheus.yml": "scrape_configs: []",
            "prometheus/alerts_test.yml": "rule_files: []\ntests: []",
        },
    )
    write(tmp_path / "generated", {"old.yaml": ""})
    write(tmp_path / "generated", generated_files(source))
    texts = texts_below(tmp_path / "generated")
    assert set(texts) == {
        "kustomization.yaml",
        "rules/alert_rules.yaml",
        "rules/recording.yaml",
        "grafana/overview.json",
        "grafana/per_worker.json",
    }
    kustomization = yaml.safe_load(texts["kustomization.yaml"])
    assert [entry["name"] for entry in kustomization["configMapGenerator"]] == [
        "stallfree-dashboard-per-worker",
        "stallfree-dashboard-overview",
    ]
    assert kustomization["generatorOptions"]["labels"] == {"grafana_dashboard": "1"}
    rule = yaml.safe_load(texts["rules/alert_rules.yaml"])
    assert rule["metadata"]["name"] == "stallfree-alert-rules"
    assert rule["spec"] == yaml.safe_load(rules("levels", "health"))
    assert texts["rules/alert_rules.yaml"].endswith("# the end")
    assert monitor_rules.findings(rule) == []


def test_without_dashboards_and_rules_there_is_still_a_folder_to_apply(tmp_path: Path) -> None:
    assert yaml.safe_load(generated_files(tmp_path)["kustomization.yaml"])["resources"] == []


@pytest.mark.parametrize(
    ("files", "reason"),
    [
        ({"grafana/a.json": "{"}, "is no JSON"),
        ({"grafana/a.json": json.dumps(DASHBOARD), "grafana/b/a.json": json.dumps(DASHBOARD)}, "two dashboards"),
        ({"grafana/a.json": json.dumps({**DASHBOARD, "panels": ["x" * 2**20]})}, "larger than"),
        ({"prometheus/a.yml": rules("same"), "prometheus/a.yaml": rules("same")}, "two rule files"),
        ({"prometheus/a.yml": "groups: ["}, "is no YAML"),
    ],
)
def test_what_could_not_be_applied_is_refused_by_name(tmp_path: Path, files: dict[str, str], reason: str) -> None:
    with pytest.raises(BuildError, match=reason):
        generated_files(monitoring(tmp_path, files))
