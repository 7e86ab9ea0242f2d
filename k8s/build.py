"""Writes `base/generated` from `monitoring/`: dashboards as ConfigMaps for Grafana, rule files as PrometheusRules.

Kustomize reads no file outside of its root, so they are copied, and a test holds the copies equal. Any `*.json` below
`monitoring/grafana` that is a dashboard and any rule file below `monitoring/prometheus` is taken; knows none by name.

    python -m k8s.build
"""

import json
import re
import shutil
import sys
from pathlib import Path
from textwrap import indent
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[1]
MONITORING = ROOT / "monitoring"
GENERATED = ROOT / "k8s" / "base" / "generated"
_HEADER = "# Written by `python -m k8s.build` from monitoring/: change it there.\n"
#: of a ConfigMap, in Kubernetes
_MAX_CONFIG_MAP_BYTES = 1024 * 1024


class BuildError(ValueError):
    """A dashboard or rule file that cannot be applied; the message names it."""


def generated_files(monitoring: Path) -> dict[str, str]:
    """Texts by their paths in the generated folder, from whatever dashboards and rules there are."""
    files: dict[str, str] = {}
    generators: list[dict[str, Any]] = []
    for path in _dashboards(monitoring / "grafana"):
        name = f"grafana/{path.name}"
        if name in files:
            raise BuildError(f"two dashboards are named {path.name}")
        files[name] = path.read_text(encoding="utf-8")
        if len(files[name].encode()) > _MAX_CONFIG_MAP_BYTES:
            raise BuildError(f"{path.name} is larger than a ConfigMap may be")
        # One ConfigMap each: together they would pass the limit some day.
        generators.append(
            {"name": f"stallfree-dashboard-{_label(path.stem).removeprefix('stallfree-')}", "files": [name]}
        )
    resources = []
    for path in _rule_files(monitoring / "prometheus"):
        name = f"rules/{path.stem}.yaml"
        if name in files:
            raise BuildError(f"two rule files are named {path.stem}")
        files[name] = _prometheus_rule(_label(path.stem), path.read_text(encoding="utf-8"))
        resources.append(name)
    files["kustomization.yaml"] = _HEADER + _yaml(_kustomization(resources, generators))
    return files


def write(target: Path, files: dict[str, str]) -> None:
    """The folder holds these files and no others afterwards."""
    if target.exists():
        shutil.rmtree(target)
    for name, text in files.items():
        path = target / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")


def _dashboards(folder: Path) -> list[Path]:
    """JSON files with panels: a folder for Grafana may hold provisioning and schemas as well."""
    found = []
    for path in sorted(folder.rglob("*.json")):
        try:
            value = json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise BuildError(f"{path.name} is no JSON: {error}") from error
        if isinstance(value, dict) and "panels" in value and "title" in value:
            found.append(path)
    return found


def _rule_files(folder: Path) -> list[Path]:
    """Files of groups alone: a scrape config and unit tests of rules are others' business."""
    found = []
    for path in sorted([*folder.rglob("*.yml"), *folder.rglob("*.yaml")]):
        try:
            value = yaml.safe_load(path.read_text(encoding="utf-8"))
        except yaml.YAMLError as error:
            raise BuildError(f"{path.name} is no YAML: {error}") from error
        if isinstance(value, dict) and set(value) == {"groups"}:
            found.append(path)
    return found


def _prometheus_rule(name: str, rules: str) -> str:
    """The file as it is, comments and all, below `spec`. One of each file: group names are unique only within one."""
    head = {
        "apiVersion": "monitoring.coreos.com/v1",
        "kind": "PrometheusRule",
        # the label by which a kube-prometheus-stack of that name selects, as for the PodMonitors
        "metadata": {"name": f"stallfree-{name}", "labels": {"release": "prometheus"}},
    }
    return f"{_HEADER}{_yaml(head)}spec:\n{indent(rules, '  ')}"


def _kustomization(resources: list[str], generators: list[dict[str, Any]]) -> dict[str, Any]:
    # kustomize refuses a folder that says nothing; that it has no resources is something
    kustomization: dict[str, Any] = {
        "apiVersion": "kustomize.config.k8s.io/v1beta1",
        "kind": "Kustomization",
        "resources": resources,
    }
    if generators:
        kustomization["configMapGenerator"] = generators
        # Grafana's sidecar looks for the label and takes changes by itself: no hash in the names.
        kustomization["generatorOptions"] = {"disableNameSuffixHash": True, "labels": {"grafana_dashboard": "1"}}
    return kustomization


def _label(stem: str) -> str:
    """A file's name as part of a resource's name."""
    return re.sub(r"[^a-z0-9]+", "-", stem.lower()).strip("-")


def _yaml(value: dict[str, Any]) -> str:
    return yaml.safe_dump(value, sort_keys=False, allow_unicode=True, width=120)


def main() -> int:
    try:
        files = generated_files(MONITORING)
    except BuildError as error:
        print(error, file=sys.stderr)
        return 1
    write(GENERATED, files)
    print(f"{len(files)} files in {GENERATED.relative_to(ROOT)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
