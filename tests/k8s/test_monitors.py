"""What the Prometheus operator makes of the PodMonitors and the rule: promtool takes it, and each target is a port."""

from pathlib import Path
from typing import Any

import pytest

from tests.k8s import prometheus
from tests.k8s.manifests import GPU_APPLIED, Rendered, rendered
from tests.k8s.monitor_rules import scrape_configs

pytestmark = pytest.mark.slow

NAMESPACE = "serving"


def rule_files(manifests: Rendered) -> dict[str, dict[str, Any]]:
    """Of the Prometheus operator: one for each PrometheusRule."""
    return {rule["metadata"]["name"]: rule["spec"] for rule in manifests.of_kind("PrometheusRule")}


@pytest.mark.parametrize("folder", GPU_APPLIED)
def test_promtool_takes_the_scrape_configs_and_the_rules(folder: str, tmp_path: Path) -> None:
    manifests = rendered(folder)
    configs = [config for monitor in manifests.of_kind("PodMonitor") for config in scrape_configs(monitor, NAMESPACE)]
    assert len(configs) == 4
    assert prometheus.check("config", prometheus.write_config(tmp_path, configs, rule_files(manifests))) == ""


def test_promtool_finds_a_planted_error(tmp_path: Path) -> None:
    (monitor, _) = rendered("base").of_kind("PodMonitor")
    wrong = {**scrape_configs(monitor, NAMESPACE)[0], "scrape_timeout": "1h"}
    assert "scrape timeout" in prometheus.check("config", prometheus.write_config(tmp_path, [wrong], {}))
    rules = {"groups": [{"name": "planted", "rules": [{"alert": "Planted", "expr": "up =="}]}]}
    assert "Planted" in prometheus.check("config", prometheus.write_config(tmp_path, [], {"planted": rules}))


@pytest.mark.parametrize("folder", GPU_APPLIED)
def test_each_endpoint_is_a_port_of_the_pods_that_its_monitor_selects(folder: str) -> None:
    manifests = rendered(folder)
    for monitor in manifests.of_kind("PodMonitor"):
        wanted = monitor["spec"]["selector"]["matchLabels"]
        ports: set[str] = set()
        for node_type, template in manifests.templates.items():
            if wanted.items() <= {**template["metadata"]["labels"], "ray.io/node-type": node_type}.items():
                ports |= set(manifests.ports(node_type))
        assert {endpoint["port"] for endpoint in monitor["spec"]["podMetricsEndpoints"]} <= ports
