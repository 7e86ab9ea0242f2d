"""Whatever checks the manifests finds what it is there for: one planted error of each kind."""

import copy
from collections.abc import Callable
from typing import Any

import pytest

from tests.k8s import monitor_rules, rayservice_rules
from tests.k8s.manifests import rendered
from tests.k8s.test_manifests import schema_findings

pytestmark = pytest.mark.slow

Change = Callable[[dict[str, Any]], object]


def cluster(service: dict[str, Any]) -> dict[str, Any]:
    return service["spec"]["rayClusterConfig"]


def head_pod(service: dict[str, Any]) -> dict[str, Any]:
    return cluster(service)["headGroupSpec"]["template"]["spec"]


def workers(service: dict[str, Any]) -> dict[str, Any]:
    return cluster(service)["workerGroupSpecs"][0]


def incremental(**options: Any) -> dict[str, Any]:
    whole = {"gatewayClassName": "istio", "intervalSeconds": 5, "stepSizePercent": 10, **options}
    return {"upgradeStrategy": {"type": "NewClusterWithIncrementalUpgrade", "clusterUpgradeOptions": whole}}


SCHEMA_ERRORS: dict[str, Change] = {
    "'serveConfig' was unexpected": lambda s: s["spec"].update(serveConfig="applications: []"),
    "'minReplica' was unexpected": lambda s: workers(s).update(minReplica=1),
    "'containerport' was unexpected": lambda s: head_pod(s)["containers"][0]["ports"].append({"containerport": 1}),
    "'two' is not of type 'integer'": lambda s: workers(s).update(replicas="two"),
    "'latest' is not one of": lambda s: cluster(s).update(autoscalerOptions={"version": "latest"}),
    "'headGroupSpec' is a required property": lambda s: cluster(s).pop("headGroupSpec"),
    "-1 is less than the minimum": lambda s: s["spec"].update(rayClusterDeletionDelaySeconds=-1),
    "'gatewayClassName' is a required": lambda s: s["spec"].update(
        upgradeStrategy={"clusterUpgradeOptions": {"intervalSeconds": 5, "stepSizePercent": 10}}
    ),
    "0 is not of type 'string'": lambda s: cluster(s)["headGroupSpec"]["rayStartParams"].update({"num-cpus": 0}),
}
OPERATOR_ERRORS: dict[str, Change] = {
    "more than 47 characters": lambda s: s["metadata"].update(name="s" * 48),
    "no DNS-1035 label": lambda s: s["metadata"].update(name="0-stallfree"),
    "upgradeStrategy.type is none of": lambda s: s["spec"].update(upgradeStrategy={"type": "Rolling"}),
    "upgrade needs enableInTreeAutoscaling": lambda s: s["spec"].update(incremental()),
    "upgrade needs gatewayClassName": lambda s: s["spec"].update(incremental(gatewayClassName="")),
    "above maxSurgePercent": lambda s: s["spec"].update(incremental(stepSizePercent=60, maxSurgePercent=50)),
    "managedBy nobody is unknown": lambda s: s["spec"].update(managedBy="nobody"),
    "headService.metadata.name must not": lambda s: cluster(s)["headGroupSpec"].update(
        headService={"metadata": {"name": "head"}}
    ),
    "two worker groups have one name": lambda s: cluster(s)["workerGroupSpecs"].append(workers(s)),
    "has no container": lambda s: cluster(s)["workerGroupSpecs"].append(
        {"groupName": "empty", "minReplicas": 0, "maxReplicas": 1, "template": {"spec": {"containers": []}}}
    ),
    "replicas outside of its bounds": lambda s: workers(s).update(replicas=9),
    "in rayStartParams and in resources": lambda s: cluster(s)["headGroupSpec"].update(resources={"CPU": "1"}),
    "has labels in rayStartParams": lambda s: workers(s)["rayStartParams"].update(labels="a=b"),
    "without enableInTreeAutoscaling": lambda s: head_pod(s)["containers"][0]["env"].append(
        {"name": "RAY_enable_autoscaler_v2", "value": "1"}
    ),
    "RAY_REDIS_ADDRESS without": lambda s: head_pod(s)["containers"][0]["env"].append(
        {"name": "RAY_REDIS_ADDRESS", "value": "redis:6379"}
    ),
    "no port named serve": lambda s: head_pod(s)["containers"][0]["ports"].pop(2),
}
AUTOSCALER_ERRORS: dict[str, Change] = {
    "restartPolicy of head must be Never": lambda s: head_pod(s).update(restartPolicy="Always"),
    "restartPolicy of gpu must be Never": lambda s: workers(s)["template"]["spec"].update(restartPolicy="Always"),
    "version is given twice": lambda s: head_pod(s)["containers"][0]["env"].append(
        {"name": "RAY_enable_autoscaler_v2", "value": "1"}
    ),
    "is suspended beside an autoscaler": lambda s: workers(s).update(suspend=True),
}
FAULT_TOLERANCE_ERRORS: dict[str, Change] = {
    "REDIS_PASSWORD beside": lambda s: head_pod(s)["containers"][0]["env"].append(
        {"name": "REDIS_PASSWORD", "value": "x"}
    ),
    "ray.io/ft-enabled beside": lambda s: s["metadata"].update(annotations={"ray.io/ft-enabled": "true"}),
    "redis-password beside": lambda s: cluster(s)["headGroupSpec"]["rayStartParams"].update({"redis-password": "x"}),
}


@pytest.mark.parametrize(
    ("folder", "errors"),
    [
        ("base", SCHEMA_ERRORS),
        ("base", OPERATOR_ERRORS),
        ("overlays/autoscale", AUTOSCALER_ERRORS),
        ("overlays/ha", FAULT_TOLERANCE_ERRORS),
    ],
    ids=["schema", "operator", "autoscaler", "fault-tolerance"],
)
def test_each_planted_error_of_a_ray_service_is_found(folder: str, errors: dict[str, Change]) -> None:
    found: dict[str, list[str]] = {}
    for expected, change in errors.items():
        service = copy.deepcopy(rendered(folder).service)
        change(service)
        found[expected] = rayservice_rules.findings(service)
    missed = {expected for expected, texts in found.items() if not any(expected in text for text in texts)}
    assert missed == set(), found


@pytest.mark.parametrize(
    ("kind", "change"),
    [
        ("PodDisruptionBudget", lambda d: d["spec"].update(minavailable=1)),
        ("NetworkPolicy", lambda d: d["spec"]["ingress"][0].update(form=[])),
        ("ServiceAccount", lambda d: d.update(automountServiceAccountToken="no")),
        ("StatefulSet", lambda d: d["spec"].pop("selector")),
        ("PersistentVolumeClaim", lambda d: d["spec"].update(accessModes="ReadWriteMany")),
    ],
)
def test_each_planted_error_of_a_core_kind_is_found(kind: str, change: Change) -> None:
    document = copy.deepcopy(rendered("overlays/ha").of_kind(kind)[0])
    assert schema_findings(document) == []
    change(document)
    assert schema_findings(document) != []


@pytest.mark.parametrize(
    "change",
    [
        lambda d: d["spec"].update(podMetricsEndpoint=[]),
        lambda d: d["spec"]["podMetricsEndpoints"][0].update(port="a-name-that-is-too-long"),
        lambda d: d["spec"]["podMetricsEndpoints"][0].update(interval="often"),
        lambda d: d["spec"]["podMetricsEndpoints"][0]["relabelings"][0].update(target_label="job"),
        lambda d: d.update(apiVersion="monitoring.coreos.com/v2"),
    ],
)
def test_each_planted_error_of_a_pod_monitor_is_found(change: Change) -> None:
    document = copy.deepcopy(rendered("base").of_kind("PodMonitor")[0])
    change(document)
    assert monitor_rules.findings(document) != []
