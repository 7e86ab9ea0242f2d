"""The Prometheus operator's kinds: which fields they have, and the scrape config that it makes of a PodMonitor.

As far as our manifests go: a field that is not here is a finding, so that adding one means looking it up.
"""

from typing import Any

from jsonschema import Draft202012Validator

_LABELS = {"type": "object", "additionalProperties": {"type": "string"}}
_DURATION = {"type": "string", "pattern": r"^(\d+(ms|s|m|h|d))+$"}


def _closed(properties: dict[str, Any], *required: str) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(required), "additionalProperties": False}


_METADATA = _closed({"name": {"type": "string"}, "labels": _LABELS, "annotations": _LABELS}, "name")
_RELABELING = _closed(
    {
        "sourceLabels": {"type": "array", "items": {"type": "string"}},
        "targetLabel": {"type": "string"},
        "regex": {"type": "string"},
        "replacement": {"type": "string"},
        "action": {"enum": ["replace", "keep", "drop", "labelmap", "labeldrop", "labelkeep"]},
    }
)
_ENDPOINT = _closed(
    {
        "port": {"type": "string", "maxLength": 15},
        "path": {"type": "string", "pattern": "^/"},
        "interval": _DURATION,
        "scrapeTimeout": _DURATION,
        "relabelings": {"type": "array", "items": _RELABELING},
    },
    "port",
)
_POD_MONITOR = _closed(
    {
        "selector": _closed({"matchLabels": _LABELS}, "matchLabels"),
        "podMetricsEndpoints": {"type": "array", "items": _ENDPOINT, "minItems": 1},
    },
    "selector",
    "podMetricsEndpoints",
)
_RULE = _closed(
    {
        "alert": {"type": "string"},
        "record": {"type": "string"},
        "expr": {"type": ["string", "integer"]},
        "for": _DURATION,
        "keep_firing_for": _DURATION,
        "labels": _LABELS,
        "annotations": _LABELS,
    },
    "expr",
)
_GROUP = _closed(
    {
        "name": {"type": "string"},
        "interval": _DURATION,
        "labels": _LABELS,
        "limit": {"type": "integer"},
        "rules": {"type": "array", "items": _RULE},
    },
    "name",
    "rules",
)
_PROMETHEUS_RULE = _closed({"groups": {"type": "array", "items": _GROUP}}, "groups")
_SPECS = {"PodMonitor": _POD_MONITOR, "PrometheusRule": _PROMETHEUS_RULE}


def findings(document: dict[str, Any]) -> list[str]:
    schema = _closed(
        {
            "apiVersion": {"const": "monitoring.coreos.com/v1"},
            "kind": {"const": document["kind"]},
            "metadata": _METADATA,
            "spec": _SPECS[document["kind"]],
        },
        *("apiVersion", "kind", "metadata", "spec"),
    )
    return [error.message for error in Draft202012Validator(schema).iter_errors(document)]


def scrape_configs(monitor: dict[str, Any], namespace: str) -> list[dict[str, Any]]:
    """One for each endpoint, without its discovery: which of the pods' ports it keeps, and how they are labelled."""
    return [
        {
            "job_name": f"podMonitor/{namespace}/{monitor['metadata']['name']}/{index}",
            "metrics_path": endpoint.get("path", "/metrics"),
            "scrape_interval": endpoint.get("interval", "1m"),
            **({"scrape_timeout": endpoint["scrapeTimeout"]} if "scrapeTimeout" in endpoint else {}),
            "relabel_configs": [
                *(
                    _keep(f"__meta_kubernetes_pod_label_{_as_label(name)}", value)
                    for name, value in monitor["spec"]["selector"]["matchLabels"].items()
                ),
                _keep("__meta_kubernetes_namespace", namespace),
                _keep("__meta_kubernetes_pod_container_port_name", endpoint["port"]),
                {"source_labels": ["__meta_kubernetes_namespace"], "target_label": "namespace"},
                {"source_labels": ["__meta_kubernetes_pod_name"], "target_label": "pod"},
                {"target_label": "endpoint", "replacement": endpoint["port"]},
                *(_relabeling(relabeling) for relabeling in endpoint.get("relabelings", ())),
            ],
        }
        for index, endpoint in enumerate(monitor["spec"]["podMetricsEndpoints"])
    ]


def discovered(template: dict[str, Any], node_type: str, port_name: str, namespace: str) -> dict[str, str]:
    """The labels under which Prometheus finds that port of a pod of this template, with those that KubeRay adds."""
    cluster = "stallfree-abcde"
    labels = {**template["metadata"]["labels"], "ray.io/cluster": cluster, "ray.io/node-type": node_type}
    return {
        **{f"__meta_kubernetes_pod_label_{_as_label(name)}": value for name, value in labels.items()},
        "__meta_kubernetes_pod_container_port_name": port_name,
        "__meta_kubernetes_namespace": namespace,
        "__meta_kubernetes_pod_name": f"{cluster}-{node_type}",
    }


def _keep(label: str, value: str) -> dict[str, Any]:
    return {"source_labels": [label], "regex": value.replace(".", r"\."), "action": "keep"}


def _relabeling(relabeling: dict[str, Any]) -> dict[str, Any]:
    names = {"sourceLabels": "source_labels", "targetLabel": "target_label"}
    return {names.get(name, name): value for name, value in relabeling.items()}


def _as_label(name: str) -> str:
    """As Prometheus writes a pod's label."""
    return "".join(character if character.isalnum() else "_" for character in name)
