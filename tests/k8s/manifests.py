"""The manifests as tests read them: Serve documents from their files, everything else rendered by kubectl."""

import subprocess
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
K8S = ROOT / "k8s"
#: folders that can be applied
APPLIED = ("base", "overlays/cpu-demo", "overlays/gpu", "overlays/autoscale", "overlays/ha")
GPU_APPLIED = tuple(name for name in APPLIED if name != "overlays/cpu-demo")
#: of the extra `kubernetes`: another one on the machine may be too old to know components
KUBECTL = Path(sys.executable).with_name("kubectl")
RENDER_TIMEOUT_S = 60.0


def serve_document(folder: str) -> dict[str, Any]:
    return yaml.safe_load((K8S / folder / "serve.yaml").read_text())


def serve_args(folder: str) -> dict[str, Any]:
    (application,) = serve_document(folder)["applications"]
    return application["args"]


def serve_deployments(folder: str) -> dict[str, dict[str, Any]]:
    """What the document overrides, by the deployments' names."""
    (application,) = serve_document(folder)["applications"]
    return {deployment["name"]: deployment for deployment in application.get("deployments", ())}


@dataclass(frozen=True)
class Rendered:
    """What is applied for one folder."""

    documents: tuple[dict[str, Any], ...]

    def of_kind(self, kind: str) -> list[dict[str, Any]]:
        return [document for document in self.documents if document["kind"] == kind]

    @property
    def service(self) -> dict[str, Any]:
        (service,) = self.of_kind("RayService")
        return service

    @property
    def cluster(self) -> dict[str, Any]:
        return self.service["spec"]["rayClusterConfig"]

    @property
    def templates(self) -> dict[str, dict[str, Any]]:
        """Pod templates: `head` and `worker`."""
        (group,) = self.cluster["workerGroupSpecs"]
        return {"head": self.cluster["headGroupSpec"]["template"], "worker": group["template"]}

    def container(self, node_type: str) -> dict[str, Any]:
        """Ray's own: the first one of the pod."""
        return self.templates[node_type]["spec"]["containers"][0]

    def ports(self, node_type: str) -> dict[str, int]:
        return {port["name"]: port["containerPort"] for port in self.container(node_type)["ports"]}

    def environment(self, node_type: str) -> dict[str, str | None]:
        """None for what comes out of a Secret."""
        return {variable["name"]: variable.get("value") for variable in self.container(node_type)["env"]}


@cache
def rendered(folder: str) -> Rendered:
    """By kubectl, which tests without it skip."""
    if not KUBECTL.exists():
        pytest.skip("kubectl is not in the environment: pip install -e '.[kubernetes]'")
    ended = subprocess.run(
        [str(KUBECTL), "kustomize", str(K8S / folder)],
        capture_output=True,
        text=True,
        timeout=RENDER_TIMEOUT_S,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    return Rendered(tuple(document for document in yaml.safe_load_all(ended.stdout) if document is not None))
