"""What is applied: taken by the API server and KubeRay's operator, and in accord with the code that runs in it."""

import os
import re
from pathlib import Path
from typing import Any

import pytest
from ray._private.ray_constants import RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S

from deployments.app import WORKER_NAME
from deployments.config import API_KEYS_VARIABLE, PREFIX_CACHE_SECRET_VARIABLE, RAY_ENVIRONMENT
from deployments.node_drain import options_of
from tests.k8s import monitor_rules, rayservice_rules
from tests.k8s.manifests import APPLIED, GPU_APPLIED, K8S, ROOT, rendered, serve_args, serve_deployments, serve_document

pytestmark = pytest.mark.slow

KUBERNETES = "1.37"
#: kinds that Kubernetes itself does not have
CUSTOM_KINDS = {"RayService", "PodMonitor", "PrometheusRule"}
every_folder = pytest.mark.parametrize("folder", APPLIED)
every_gpu_folder = pytest.mark.parametrize("folder", GPU_APPLIED)


def schema_findings(document: dict[str, Any]) -> list[str]:
    """By Kubernetes' own schemas, strictly."""
    validate = pytest.importorskip("kubernetes_validate", reason="pip install -e '.[kubernetes]'")
    try:
        validate.validate(document, KUBERNETES, strict=True)
    except validate.ValidationError as error:
        return [error.message]
    return []


def preceding_stop(container: dict[str, Any]) -> list[str]:
    return container["lifecycle"]["preStop"]["exec"]["command"]


def drain_deadline_s(container: dict[str, Any]) -> float:
    *shell, line = preceding_stop(container)
    assert shell == ["bash", "-c"]
    words = line.split()
    assert words[:4] == ["exec", "python", "-m", "deployments.node_drain"]
    return options_of([word.strip('"') for word in words[4:]]).deadline_s


@every_folder
def test_the_operator_would_take_the_ray_service(folder: str) -> None:
    assert rayservice_rules.findings(rendered(folder).service) == []


@every_folder
def test_kubernetes_would_take_all_that_is_its_own(folder: str) -> None:
    documents = [document for document in rendered(folder).documents if document["kind"] not in CUSTOM_KINDS]
    assert documents
    assert {document["metadata"]["name"]: schema_findings(document) for document in documents} == {
        document["metadata"]["name"]: [] for document in documents
    }


@every_folder
def test_kubernetes_would_take_the_pods_of_head_and_workers(folder: str) -> None:
    for node_type, template in rendered(folder).templates.items():
        metadata = {**template["metadata"], "name": node_type}
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": template["spec"]}
        assert schema_findings(pod) == []


@every_gpu_folder
def test_the_prometheus_operator_would_take_what_is_its_own(folder: str) -> None:
    monitors = [*rendered(folder).of_kind("PodMonitor"), *rendered(folder).of_kind("PrometheusRule")]
    assert [finding for monitor in monitors for finding in monitor_rules.findings(monitor)] == []
    assert {monitor["metadata"]["name"] for monitor in monitors if monitor["kind"] == "PodMonitor"} == {
        "stallfree",
        "stallfree-ray",
    }


@every_folder
def test_the_serve_config_is_the_file_that_serve_deploy_takes(folder: str) -> None:
    assert rendered(folder).service["spec"]["serveConfigV2"] == (K8S / folder / "serve.yaml").read_text()


@every_folder
def test_ports_are_those_at_which_the_code_listens(folder: str) -> None:
    args, http = serve_args(folder), serve_document(folder)["http_options"]
    assert (http["host"], args["metrics_host"]) == ("0.0.0.0", "0.0.0.0")
    for node_type in ("head", "worker"):
        ports = rendered(folder).ports(node_type)
        assert ports["serve"] == http["port"]
        assert len(set(ports.values())) == len(ports)
    # the metrics actor stays on the head
    assert rendered(folder).ports("head")["llm-metrics"] == args["metrics_port"]
    assert "llm-metrics" not in rendered(folder).ports("worker")
    (workers,) = rendered(folder).cluster["workerGroupSpecs"]
    for node_type, group in (("head", rendered(folder).cluster["headGroupSpec"]), ("worker", workers)):
        assert int(group["rayStartParams"]["metrics-export-port"]) == rendered(folder).ports(node_type)["metrics"]


@every_folder
def test_head_and_workers_have_the_environment_that_the_code_sets(folder: str) -> None:
    for node_type in ("head", "worker"):
        environment = rendered(folder).environment(node_type)
        flags = {name: value for name, value in environment.items() if name.startswith("RAY_")}
        assert flags == RAY_ENVIRONMENT
        # built on any pod
        assert environment[PREFIX_CACHE_SECRET_VARIABLE] is None
        # a file, which can be replaced without new pods
        assert API_KEYS_VARIABLE not in environment


@every_folder
def test_there_is_a_pod_for_each_worker(folder: str) -> None:
    args, (group,) = serve_args(folder), rendered(folder).cluster["workerGroupSpecs"]
    if "max_workers" in args:
        assert (args["min_workers"], args["max_workers"]) == (group["minReplicas"], group["maxReplicas"])
        assert rendered(folder).cluster["enableInTreeAutoscaling"]
    else:
        # not as num_workers: changed arguments restart all workers, a changed number nobody
        assert not {"num_workers", "num_ingress"} & set(args)
        num_workers = serve_deployments(folder)[WORKER_NAME]["num_replicas"]
        assert num_workers == group["replicas"] == group["minReplicas"] <= group["maxReplicas"]
    assert rendered(folder).cluster["headGroupSpec"]["rayStartParams"]["num-cpus"] == "0"


@every_folder
def test_workers_have_a_gpu_where_they_ask_for_one(folder: str) -> None:
    gpus = [
        rendered(folder).container(node_type)["resources"]["limits"].get("nvidia.com/gpu", 0)
        for node_type in ("head", "worker")
    ]
    assert gpus == [0, 1 if serve_args(folder)["device"] == "cuda" else 0]


@every_folder
def test_each_time_to_stop_is_longer_than_the_one_inside_of_it(folder: str) -> None:
    worker = rendered(folder).templates["worker"]["spec"]
    deadline_s = drain_deadline_s(worker["containers"][0])
    # until so long before the deadline Serve waits for new replicas, which load a model, with the old ones serving on
    assert serve_args(folder)["drain_timeout_s"] + 180 <= deadline_s
    # and then Ray's own on SIGTERM
    after_s = RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S
    assert deadline_s + after_s < worker["terminationGracePeriodSeconds"]
    assert worker["terminationGracePeriodSeconds"] <= rendered(folder).service["spec"]["rayClusterDeletionDelaySeconds"]
    if "gcsFaultToleranceOptions" in rendered(folder).cluster:
        return
    head = rendered(folder).templates["head"]["spec"]
    (program, duration_s) = preceding_stop(head["containers"][0])
    assert program == "sleep"
    assert deadline_s < float(duration_s) < head["terminationGracePeriodSeconds"] - after_s


@every_folder
def test_all_that_is_written_lies_on_a_volume(folder: str) -> None:
    for node_type, template in rendered(folder).templates.items():
        container = rendered(folder).container(node_type)
        volumes = {volume["name"] for volume in template["spec"]["volumes"]}
        mounts = {mount["mountPath"]: mount for mount in container["volumeMounts"]}
        assert {mount["name"] for mount in mounts.values()} == volumes
        writable = [Path(path) for path, mount in mounts.items() if not mount.get("readOnly")]
        environment = rendered(folder).environment(node_type)
        written = [Path("/tmp"), Path("/dev/shm")]
        written += [Path(environment[name] or "") for name in ("HF_HOME", "XDG_CACHE_HOME") if name in environment]
        assert [path for path in written if not any(path.is_relative_to(mount) for mount in writable)] == []


@every_folder
def test_the_keys_file_is_in_a_secret_that_is_mounted_on_every_pod(folder: str) -> None:
    for node_type, template in rendered(folder).templates.items():
        mounts = {mount["name"]: mount for mount in rendered(folder).container(node_type)["volumeMounts"]}
        (secret,) = [volume["secret"] for volume in template["spec"]["volumes"] if volume["name"] == "api-keys"]
        if folder == "overlays/cpu-demo":
            assert secret["optional"]
            assert "api_key_file" not in serve_args(folder)
        else:
            assert "optional" not in secret
            assert str(Path(serve_args(folder)["api_key_file"]).parent) == mounts["api-keys"]["mountPath"]


@every_folder
def test_no_container_runs_as_root_or_may_become_it(folder: str) -> None:
    specs = [template["spec"] for template in rendered(folder).templates.values()]
    specs += [stateful["spec"]["template"]["spec"] for stateful in rendered(folder).of_kind("StatefulSet")]
    for spec in specs:
        assert spec["securityContext"]["runAsNonRoot"]
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        for container in spec["containers"]:
            security = container["securityContext"]
            assert security["readOnlyRootFilesystem"]
            assert not security["allowPrivilegeEscalation"]
            assert security["capabilities"] == {"drop": ["ALL"]}
            assert not re.search(r"(:latest|:|/[^:]*)$", container["image"]), "an image without a version"


@every_folder
def test_policies_and_budgets_name_pods_and_ports_that_exist(folder: str) -> None:
    ports = set(rendered(folder).ports("head")) | set(rendered(folder).ports("worker"))
    for policy in rendered(folder).of_kind("NetworkPolicy"):
        if policy["metadata"]["name"] == "stallfree":
            named = [port["port"] for rule in policy["spec"]["ingress"] for port in rule.get("ports", ())]
            assert set(named) <= ports
    labels = {
        node_type: {**template["metadata"]["labels"], "ray.io/node-type": node_type}
        for node_type, template in rendered(folder).templates.items()
    }
    (group,) = rendered(folder).cluster["workerGroupSpecs"]
    for budget in rendered(folder).of_kind("PodDisruptionBudget"):
        wanted = budget["spec"]["selector"]["matchLabels"]
        (node_type,) = [name for name, given in labels.items() if wanted.items() <= given.items()]
        num_pods = group["replicas"] if node_type == "worker" else 1
        # Kubernetes takes nothing else for pods without a scale subresource
        assert isinstance(budget["spec"]["minAvailable"], int)
        assert budget["spec"]["minAvailable"] <= num_pods
        assert set(budget["spec"]) == {"minAvailable", "selector"}


@every_folder
def test_the_versions_are_those_of_the_image(folder: str) -> None:
    pinned = re.search(r"^ray==(.+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert pinned
    assert rendered(folder).cluster["rayVersion"] == pinned.group(1)
    project = re.search(r'^version = "(.+)"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert project
    tag = "cpu-demo" if folder == "overlays/cpu-demo" else "cuda"
    for node_type in ("head", "worker"):
        assert rendered(folder).container(node_type)["image"] == f"stallfree:{project.group(1)}-{tag}"


@every_folder
def test_rays_object_store_has_room_in_shared_memory(folder: str) -> None:
    for group in (rendered(folder).cluster["headGroupSpec"], *rendered(folder).cluster["workerGroupSpecs"]):
        (shared,) = [volume for volume in group["template"]["spec"]["volumes"] if volume["name"] == "shared-memory"]
        assert shared["emptyDir"]["medium"] == "Memory"
        limit = re.fullmatch(r"(\d+)Gi", shared["emptyDir"]["sizeLimit"])
        assert limit
        assert int(group["rayStartParams"]["object-store-memory"]) < int(limit.group(1)) * 2**30


def test_a_kustomization_of_somebodys_own_names_image_namespace_and_document(tmp_path: Path) -> None:
    serve = (K8S / "overlays/gpu/serve.yaml").read_text().replace("Qwen2.5-7B-Instruct", "Qwen2.5-14B-Instruct")
    (tmp_path / "serve.yaml").write_text(serve)
    page = (ROOT / "docs" / "kubernetes.md").read_text()
    example = re.search(r"```yaml\n(# kustomization.yaml\n.*?)```", page, re.DOTALL)
    assert example
    (tmp_path / "kustomization.yaml").write_text(
        example.group(1).replace("../stallfree/k8s", os.path.relpath(K8S, tmp_path.resolve()))
    )
    own = rendered(str(tmp_path))
    assert own.service["spec"]["serveConfigV2"] == serve
    assert own.container("worker")["image"] == "REGISTRY/stallfree:0.1.0-cuda"
    assert {document["metadata"]["namespace"] for document in own.documents} == {"serving"}
