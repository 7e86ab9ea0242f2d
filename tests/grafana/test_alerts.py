"""Rules and alerts: promtool takes them, each fires where it should, nowhere else, and is in the runbook."""

import re
import subprocess
from pathlib import Path
from typing import Any

import yaml

from monitoring.table import METRICS
from tests.debian_tools import program
from tests.grafana.expressions import metrics_in, unknown_labels

ROOT = Path(__file__).resolve().parents[2]
RULES = ROOT / "monitoring" / "prometheus"
COMPOSE = ROOT / "monitoring" / "compose"
TESTS = ROOT / "tests" / "prometheus_rules" / "alerts.yml"
RULE_FILES = (RULES / "recording-rules.yml", RULES / "alert-rules.yml")


def rules() -> list[dict[str, Any]]:
    return [
        rule for path in RULE_FILES for group in yaml.safe_load(path.read_text())["groups"] for rule in group["rules"]
    ]


def alerts() -> list[dict[str, Any]]:
    return [rule for rule in rules() if "alert" in rule]


def promtool(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([program("promtool"), *arguments], capture_output=True, text=True, timeout=60, check=False)


def test_promtool_takes_the_rules_and_the_configuration() -> None:
    for checked in (promtool("check", "rules", *RULE_FILES), promtool("check", "config", RULES / "prometheus.yml")):
        assert checked.returncode == 0, checked.stdout + checked.stderr


def test_each_alert_fires_in_its_situation_and_no_other_one_does() -> None:
    tested = promtool("test", "rules", TESTS)
    assert tested.returncode == 0, tested.stdout + tested.stderr


def test_every_alert_is_seen_to_fire_and_there_are_situations_in_which_nothing_does() -> None:
    text = TESTS.read_text()
    fired = set(re.findall(r'ALERTS\{alertname="(\w+)", alertstate="firing"', text))
    assert fired == {alert["alert"] for alert in alerts()}
    assert text.count("exp_samples: []") >= 3


def test_every_alert_has_a_severity_words_and_a_section_of_the_runbook() -> None:
    sections = re.split(r"^## ", (ROOT / "docs" / "runbook.md").read_text(), flags=re.MULTILINE)[1:]
    by_name = {section.splitlines()[0]: section for section in sections}
    assert set(by_name) == {alert["alert"] for alert in alerts()}
    for alert in alerts():
        assert alert["labels"]["severity"] in ("page", "ticket")
        annotations = alert["annotations"]
        assert annotations["summary"]
        assert annotations["description"]
        assert annotations["runbook_url"] == f"docs/runbook.md#{alert['alert'].lower()}"
        for part in ("**Means**", "**Be sure**", "**Do**"):
            assert part in by_name[alert["alert"]] or "and **do**" in by_name[alert["alert"]], alert["alert"]


def test_rules_name_metrics_labels_and_recordings_that_exist() -> None:
    recorded = {rule["record"] for rule in rules() if "record" in rule}
    used: set[str] = set()
    for rule in rules():
        expr = rule["expr"]
        own_recordings = set(re.findall(r"stallfree:[a-z0-9_:]+", expr))
        assert own_recordings <= recorded, expr
        used |= own_recordings
        if metrics_in(expr):
            assert unknown_labels(expr) == set(), expr
    # Two are for people: how much of the budget is used, and how much of the prompts was cached.
    assert recorded - used == {"stallfree:token_budget_used:ratio_rate5m", "stallfree:prefix_cache_hits:ratio_rate5m"}


def test_limits_of_promises_are_bounds_of_their_buckets() -> None:
    found = {
        (name, float(bound))
        for rule in rules()
        for name, bound in re.findall(r'(\w+)_bucket\{le="([^"]+)"\}', rule["expr"])
    }
    assert len(found) == 2
    assert all(bound in METRICS[name].buckets for name, bound in found)


def test_the_compose_file_mounts_folders_that_exist_and_scrapes_the_default_port() -> None:
    services = yaml.safe_load((COMPOSE / "compose.yml").read_text())["services"]
    for service in services.values():
        for volume in service["volumes"]:
            assert (COMPOSE / volume.split(":")[0]).resolve().is_dir(), volume
    [provider] = yaml.safe_load((COMPOSE / "provisioning/dashboards/stallfree.yml").read_text())["providers"]
    mounts = {volume.split(":")[1] for volume in services["grafana"]["volumes"]}
    assert provider["options"]["path"] in mounts
    [source] = yaml.safe_load((COMPOSE / "provisioning/datasources/prometheus.yml").read_text())["datasources"]
    assert f"--web.listen-address={source['url'].removeprefix('http://')}" in services["prometheus"]["command"]
    [job] = yaml.safe_load((RULES / "prometheus.yml").read_text())["scrape_configs"]
    assert job["job_name"] == "stallfree"
    assert job["static_configs"] == [{"targets": ["127.0.0.1:9400"]}]
