"""A Serve document of the manifests on a real Ray cluster of several nodes: it answers with its keys, Prometheus finds
its series by the PodMonitor's rules, and a node is drained of it while clients ask.

What is deployed is the overlay's own file, cut down by `k8s.localize`; a tiny real model answers.
"""

import logging
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
import ray
import yaml
from ray import serve
from ray.cluster_utils import Cluster
from ray.serve.context import _get_global_client
from ray.util.state import list_actors

from deployments.app import WORKER_NAME
from deployments.cli.local_ray import OBJECT_STORE_BYTES
from deployments.config import prepare_ray_environment
from deployments.node_drain import RayNodes
from k8s.localize import localized
from monitoring import metrics_actor
from tests.k8s import monitor_rules, prometheus
from tests.k8s.manifests import ROOT, rendered, serve_document
from tests.k8s.test_manifests import drain_deadline_s
from tests.k8s.test_monitors import NAMESPACE, rule_files
from tests.server_process import free_port, wait_until
from tests.tiny_models import save_tiny_model
from tests.tiny_tokenizer import save_tiny_tokenizer

pytestmark = [pytest.mark.ray, pytest.mark.slow]

FOLDER = "overlays/gpu"
KEY = "a-key-of-the-test"
NUM_TOKENS = 20
SERVE_PROGRAM = Path(sys.executable).with_name("serve")
START_TIMEOUT_S = 150.0
COMMAND_TIMEOUT_S = 90.0
DRAIN_TIMEOUT_S = 150.0


@dataclass
class Deployed:
    """`failures`: what went wrong with a stream; `num_whole`: streams that came to their end."""

    nodes: Cluster
    document: dict[str, Any]
    port: int
    metrics_port: int
    failures: list[str] = field(default_factory=list)
    num_whole: int = 0

    def deploy(self, path: Path) -> None:
        path.write_text(yaml.safe_dump(self.document))
        ended = subprocess.run(
            [str(SERVE_PROGRAM), "deploy", str(path), "-a", f"http://{self.nodes.webui_url}"],
            capture_output=True,
            text=True,
            timeout=COMMAND_TIMEOUT_S,
            check=False,
        )
        assert ended.returncode == 0, ended.stderr
        wait_until(lambda: serve.status().applications["stallfree"].status == "RUNNING", START_TIMEOUT_S)

    def workers(self) -> set[str]:
        """The processes that serve."""
        details = _get_global_client().get_serve_details()["applications"]["stallfree"]["deployments"][WORKER_NAME]
        return {str(replica["actor_id"]) for replica in details["replicas"] if replica["state"] == "RUNNING"}

    def chat(self, *, stream: bool = False, key: str = KEY) -> httpx.Response:
        body = {"model": "tiny", "max_tokens": NUM_TOKENS, "stream": stream, "ignore_eos": True}
        body["messages"] = [{"role": "user", "content": "Hello"}]
        headers = {"Authorization": f"Bearer {key}"}
        return httpx.post(f"http://127.0.0.1:{self.port}/v1/chat/completions", json=body, headers=headers, timeout=60)

    def stream(self) -> None:
        try:
            answer = self.chat(stream=True)
        except httpx.TransportError as error:
            self.failures.append(repr(error))
            return
        if answer.status_code != 200 or not answer.text.rstrip().endswith("data: [DONE]"):
            self.failures.append(f"{answer.status_code} {answer.text[-300:]}")
        else:
            self.num_whole += 1

    @contextmanager
    def asked(self) -> Iterator[None]:
        """Streams one after the other while the block runs."""
        ends = threading.Event()

        def ask() -> None:
            while not ends.is_set():
                self.stream()

        thread = threading.Thread(target=ask)
        thread.start()
        try:
            yield
        finally:
            ends.set()
            thread.join(60)


@pytest.fixture(scope="module")
def deployed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployed]:
    folder = tmp_path_factory.mktemp("k8s")
    model = save_tiny_tokenizer(save_tiny_model(folder / "tiny", "llama"))
    (folder / "keys.yaml").write_text(yaml.safe_dump([{"key": KEY, "tenant": "test"}]))
    before = dict(os.environ)
    prepare_ray_environment(ROOT)
    logging.getLogger("ray.serve").setLevel(logging.ERROR)
    # As in the manifests: no replica on the head.
    head = {"num_cpus": 0, "object_store_memory": OBJECT_STORE_BYTES, "include_dashboard": True}
    nodes = Cluster(initialize_head=True, head_node_args={**head, "dashboard_port": free_port()})
    try:
        nodes.add_node(num_cpus=4, object_store_memory=OBJECT_STORE_BYTES)
        ray.init(address=nodes.address, log_to_driver=False, logging_level=logging.ERROR)
        port, metrics_port = free_port(), free_port()
        document = localized(
            serve_document(FOLDER),
            model=str(model),
            port=port,
            metrics_port=metrics_port,
            api_key_file=str(folder / "keys.yaml"),
        )
        application = Deployed(nodes, document, port, metrics_port)
        application.deploy(folder / "serve.yaml")
        yield application
    finally:
        if ray.is_initialized():
            serve.shutdown()
            metrics_actor.remove("stallfree")
        ray.shutdown()
        nodes.shutdown()
        os.environ.clear()
        os.environ.update(before)


def test_the_deployed_document_answers_a_chat_to_whoever_has_a_key(deployed: Deployed) -> None:
    assert deployed.chat(key="another").status_code == 401
    answer = deployed.chat()
    assert answer.status_code == 200, answer.text
    assert answer.json()["usage"]["completion_tokens"] == NUM_TOKENS
    assert httpx.get(f"http://127.0.0.1:{deployed.port}/-/healthz").text == "success"


def test_the_metrics_actor_stays_with_the_head_whichever_node_that_is(deployed: Deployed) -> None:
    name = metrics_actor.actor_name("stallfree")
    (actor,) = list_actors(
        f"http://{deployed.nodes.webui_url}", filters=[("name", "=", name), ("state", "=", "ALIVE")], detail=True
    )
    assert actor.node_id == deployed.nodes.head_node.node_id
    # a head that was replaced has another id, but the same resource
    assert actor.required_resources == {"node:__internal_head__": 0.001}


def test_prometheus_finds_the_series_by_the_pod_monitors_rules(deployed: Deployed, tmp_path: Path) -> None:
    manifests = rendered(FOLDER)
    (ours, _) = manifests.of_kind("PodMonitor")
    (config,) = monitor_rules.scrape_configs(ours, NAMESPACE)
    target = f"127.0.0.1:{deployed.metrics_port}"
    found = monitor_rules.discovered(manifests.templates["head"], "head", "llm-metrics", NAMESPACE)
    # another port of the same pod, and the same port of another application's pod: neither is scraped
    others = [
        {**found, "__meta_kubernetes_pod_container_port_name": "metrics"},
        {**found, "__meta_kubernetes_pod_label_app_kubernetes_io_part_of": "another"},
    ]
    configs = [prometheus.over(config, target, [found, *others])]
    with prometheus.running(prometheus.write_config(tmp_path, configs, rule_files(manifests))) as server:
        wait_until(lambda: bool(server.query("stallfree_worker_up == 1")), 20.0)
        (up,) = server.query("up")
        assert {name: up[name] for name in ("job", "namespace", "ray_io_cluster", "endpoint")} == {
            "job": "stallfree",
            "namespace": NAMESPACE,
            "ray_io_cluster": found["__meta_kubernetes_pod_label_ray_io_cluster"],
            "endpoint": "llm-metrics",
        }


def test_another_number_of_workers_restarts_none(deployed: Deployed, tmp_path: Path) -> None:
    before = deployed.workers()
    assert len(before) == 1
    (application,) = deployed.document["applications"]
    (worker,) = [each for each in application["deployments"] if each["name"] == WORKER_NAME]
    worker["num_replicas"] = 2
    deployed.deploy(tmp_path / "serve.yaml")
    wait_until(lambda: len(deployed.workers()) == 2, START_TIMEOUT_S)
    assert before < deployed.workers()


def test_a_node_is_drained_while_clients_ask_and_none_of_them_sees_it(deployed: Deployed) -> None:
    (leaving,) = [node.node_id for node in deployed.nodes.worker_nodes]
    deployed.nodes.add_node(num_cpus=4, object_store_memory=OBJECT_STORE_BYTES)
    deadline_s = drain_deadline_s(rendered(FOLDER).container("worker"))
    command = [sys.executable, "-m", "deployments.node_drain", "--address", deployed.nodes.address]
    command += ["--node-id", leaving, "--deadline-s", str(deadline_s)]
    before = deployed.workers()
    with deployed.asked():
        wait_until(lambda: deployed.num_whole > 3, 30.0)
        assert RayNodes(deployed.nodes.address).serve_actors(leaving)
        process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        num_at_start = deployed.num_whole
        try:
            wait_until(lambda: bool(deployed.workers() - before), DRAIN_TIMEOUT_S)
            num_meanwhile = deployed.num_whole - num_at_start
            output, _ = process.communicate(timeout=DRAIN_TIMEOUT_S)
        finally:
            process.kill()
        assert process.returncode == 0, output
        num_at_end = deployed.num_whole
        wait_until(lambda: deployed.num_whole > num_at_end + 3, 30.0)
    assert deployed.failures == []
    # the old replicas served until the new ones were up
    assert num_meanwhile >= 5
    assert RayNodes(deployed.nodes.address).serve_actors(leaving) == []
