"""What the API server and KubeRay's operator refuse in a RayService, as findings; empty if it would be taken.

The schema is KubeRay's own, v1.7.0, of a copy beside the checkout, read strictly: a field that it does not have is an
error, where the API server would drop it in silence. The operator's rules beyond the schema are those of its
validation at that version, as far as they concern what can stand in our manifests.
"""

import json
import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator

SCHEMA_FILE = Path(__file__).parents[3] / "shared" / "data" / "kuberay" / "rayservice.v1.schema.json"
MAX_NAME_CHARS = 47
DNS_1035 = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
UPGRADE_TYPES = ("NewCluster", "NewClusterWithIncrementalUpgrade", "None")
MANAGERS = ("ray.io/kuberay-operator", "kueue.x-k8s.io/multikueue")
#: what gcsFaultToleranceOptions replaces
FAULT_TOLERANCE_ENVIRONMENT = {"RAY_REDIS_ADDRESS", "REDIS_PASSWORD", "REDIS_USERNAME"}
FAULT_TOLERANCE_ANNOTATIONS = {"ray.io/ft-enabled", "ray.io/external-storage-namespace"}
RESOURCE_PARAMETERS = {"num-cpus", "num-gpus", "memory", "resources"}


def findings(service: dict[str, Any]) -> list[str]:
    by_schema = [
        f"{'.'.join(str(part) for part in error.absolute_path)}: {error.message}"
        for error in _validator().iter_errors(service)
    ]
    return by_schema or operator_findings(service)


@cache
def _validator() -> Draft202012Validator:
    if not SCHEMA_FILE.is_file():
        pytest.skip("KubeRay's schema is not in ../shared/data/kuberay")
    return Draft202012Validator(strict(json.loads(SCHEMA_FILE.read_text())["openAPIV3Schema"]))


def strict(schema: dict[str, Any]) -> dict[str, Any]:
    """A JSON schema that refuses unknown fields, of an OpenAPI one as custom resources have it. What has a default need
    not be given: the API server fills it in before it checks."""
    kept = ("enum", "pattern", "minimum", "maximum")
    result: dict[str, Any] = {name: schema[name] for name in kept if name in schema}
    if schema.get("x-kubernetes-int-or-string"):
        result["type"] = ["integer", "string"]
    elif "type" in schema:
        result["type"] = [schema["type"], "null"] if schema.get("nullable") else schema["type"]
    if "items" in schema:
        result["items"] = strict(schema["items"])
    if "properties" in schema:
        properties = schema["properties"]
        result["properties"] = {name: strict(value) for name, value in properties.items()}
        result["required"] = [name for name in schema.get("required", ()) if "default" not in properties[name]]
        result["additionalProperties"] = False
    elif isinstance(schema.get("additionalProperties"), dict):
        result["additionalProperties"] = strict(schema["additionalProperties"])
    return result


def operator_findings(service: dict[str, Any]) -> list[str]:
    """By the rules that no schema states."""
    spec, cluster = service["spec"], service["spec"]["rayClusterConfig"]
    annotations = service["metadata"].get("annotations") or {}
    return [
        *_name_findings(service["metadata"]["name"]),
        *_upgrade_findings(spec),
        *_group_findings(cluster),
        *_autoscaler_findings(cluster),
        *_fault_tolerance_findings(cluster, annotations),
        *_port_findings(cluster),
    ]


def _name_findings(name: str) -> list[str]:
    found = []
    if len(name) > MAX_NAME_CHARS:
        found.append(f"the name has more than {MAX_NAME_CHARS} characters")
    if not DNS_1035.fullmatch(name):
        found.append("the name is no DNS-1035 label")
    return found


def _upgrade_findings(spec: dict[str, Any]) -> list[str]:
    found = []
    strategy = spec.get("upgradeStrategy") or {}
    if strategy.get("type", "NewCluster") not in UPGRADE_TYPES:
        found.append(f"upgradeStrategy.type is none of {', '.join(UPGRADE_TYPES)}")
    if strategy.get("type") == "NewClusterWithIncrementalUpgrade":
        if not spec["rayClusterConfig"].get("enableInTreeAutoscaling"):
            found.append("an incremental upgrade needs enableInTreeAutoscaling")
        options = strategy.get("clusterUpgradeOptions") or {}
        found += [
            f"an incremental upgrade needs {name}"
            for name in ("stepSizePercent", "intervalSeconds", "gatewayClassName")
            if not options.get(name)
        ]
        if options.get("stepSizePercent", 0) > options.get("maxSurgePercent", 100):
            found.append("stepSizePercent is above maxSurgePercent")
    managers = (spec.get("managedBy"), spec["rayClusterConfig"].get("managedBy"))
    found += [f"managedBy {manager} is unknown" for manager in managers if manager not in (None, *MANAGERS)]
    return found


def _group_findings(cluster: dict[str, Any]) -> list[str]:
    found = []
    head = cluster["headGroupSpec"]
    if (head.get("headService") or {}).get("metadata", {}).get("name"):
        found.append("headService.metadata.name must not be set")
    names = [group["groupName"] for group in cluster.get("workerGroupSpecs") or []]
    if len(set(names)) != len(names):
        found.append("two worker groups have one name")
    for group in _groups(cluster):
        name, parameters = group.get("groupName", "head"), group.get("rayStartParams") or {}
        if not group["template"]["spec"].get("containers"):
            found.append(f"{name} has no container")
        if group.get("resources") and RESOURCE_PARAMETERS & set(parameters):
            found.append(f"{name} has resources in rayStartParams and in resources")
        if "labels" in parameters:
            found.append(f"{name} has labels in rayStartParams")
        if not group.get("minReplicas", 0) <= group.get("replicas", 0) <= group.get("maxReplicas", 2**31 - 1):
            found.append(f"{name} has replicas outside of its bounds")
        if not all(isinstance(value, str) for value in parameters.values()):
            found.append(f"{name} has a rayStartParam that is no string")
    return found


def _autoscaler_findings(cluster: dict[str, Any]) -> list[str]:
    environment = _environment(cluster["headGroupSpec"])
    if not cluster.get("enableInTreeAutoscaling"):
        is_on = environment.get("RAY_enable_autoscaler_v2") in ("1", "true")
        return ["RAY_enable_autoscaler_v2 without enableInTreeAutoscaling"] if is_on else []
    found = []
    if "version" in (cluster.get("autoscalerOptions") or {}) and "RAY_enable_autoscaler_v2" in environment:
        found.append("the autoscaler's version is given twice")
    found += [
        f"restartPolicy of {group.get('groupName', 'head')} must be Never or absent with autoscaler v2"
        for group in _groups(cluster)
        if group["template"]["spec"].get("restartPolicy", "Never") != "Never"
    ]
    found += [
        f"{group['groupName']} is suspended beside an autoscaler"
        for group in cluster.get("workerGroupSpecs") or []
        if group.get("suspend")
    ]
    return found


def _fault_tolerance_findings(cluster: dict[str, Any], annotations: dict[str, str]) -> list[str]:
    environment = set(_environment(cluster["headGroupSpec"]))
    parameters = cluster["headGroupSpec"].get("rayStartParams") or {}
    if not cluster.get("gcsFaultToleranceOptions"):
        is_half = "RAY_REDIS_ADDRESS" in environment
        return ["RAY_REDIS_ADDRESS without gcsFaultToleranceOptions"] if is_half else []
    twice = [
        *sorted(FAULT_TOLERANCE_ENVIRONMENT & environment),
        *sorted(FAULT_TOLERANCE_ANNOTATIONS & set(annotations)),
        *sorted({"redis-password", "redis-username"} & set(parameters)),
    ]
    return [f"{name} beside gcsFaultToleranceOptions" for name in twice]


def _port_findings(cluster: dict[str, Any]) -> list[str]:
    """Where the Service and KubeRay's probes look."""
    found = []
    for group in _groups(cluster):
        if not group["template"]["spec"]["containers"]:
            continue
        ports = group["template"]["spec"]["containers"][0].get("ports") or []
        names = [port.get("name", "") for port in ports]
        if not any(name == "serve" or name.startswith("serve-") for name in names):
            found.append(f"the first container of {group.get('groupName', 'head')} has no port named serve")
        found += [f"the port name {name} has more than 15 characters" for name in names if len(name) > 15]
    return found


def _groups(cluster: dict[str, Any]) -> list[dict[str, Any]]:
    return [cluster["headGroupSpec"], *(cluster.get("workerGroupSpecs") or [])]


def _environment(group: dict[str, Any]) -> dict[str, Any]:
    (container, *_) = group["template"]["spec"]["containers"]
    return {variable["name"]: variable.get("value") for variable in container.get("env") or []}
