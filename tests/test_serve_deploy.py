"""The application as Ray's own users run it: `serve deploy` of a YAML, `serve status`, live options, `serve run`.

One cluster with a dashboard for the module, a tiny real model in its workers.
"""

import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import ray
import yaml
from ray import serve
from ray.dashboard.modules.serve.sdk import ServeSubmissionClient
from ray.serve.schema import ApplicationStatusOverview

from deployments.app import WORKER_NAME
from deployments.cli.local_ray import OBJECT_STORE_BYTES
from deployments.config import prepare_ray_environment
from tests.ray_start import local_ray
from tests.server_process import free_port, wait_until
from tests.tiny_models import save_tiny_model
from tests.tiny_tokenizer import save_tiny_tokenizer

pytestmark = [pytest.mark.ray, pytest.mark.slow]

SERVE_PROGRAM = Path(sys.executable).with_name("serve")
START_TIMEOUT_S = 180.0
COMMAND_TIMEOUT_S = 120.0


@dataclass(frozen=True)
class Cluster:
    folder: Path
    model: Path
    dashboard: str
    gcs: str
    port: int

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def config(self, user_config: dict[str, Any] | None = None, **args: Any) -> Path:
        application: dict[str, Any] = {
            "name": "stallfree",
            "route_prefix": "/",
            "import_path": "deployments.app:build",
            "args": {"model": str(self.model), "metrics_port": 0, "max_num_seqs": 8, "num_threads": 1, **args},
        }
        if user_config is not None:
            application["deployments"] = [{"name": WORKER_NAME, "user_config": user_config}]
        path = self.folder / "serve.yaml"
        http_options = {"host": "127.0.0.1", "port": self.port}
        path.write_text(
            yaml.safe_dump({"proxy_location": "HeadOnly", "http_options": http_options, "applications": [application]})
        )
        return path

    def serve(self, *arguments: str) -> str:
        """Output of Ray's `serve` program."""
        ended = subprocess.run(
            [str(SERVE_PROGRAM), *arguments], capture_output=True, text=True, timeout=COMMAND_TIMEOUT_S
        )
        assert ended.returncode == 0, ended.stderr
        return ended.stdout

    def deploy(self, path: Path) -> None:
        """As `serve deploy` does, which takes seconds to start."""
        ServeSubmissionClient(self.dashboard).deploy_applications(yaml.safe_load(path.read_text()))

    def status(self) -> ApplicationStatusOverview:
        return serve.status().applications["stallfree"]

    def worker_pids(self) -> set[int]:
        """By the names that Ray gives to the processes of replicas."""
        name = f"ray::ServeReplica:stallfree:{WORKER_NAME}"
        pids = set()
        for process in psutil.Process().children(recursive=True):
            with suppress(psutil.NoSuchProcess):  # it has ended meanwhile
                if any(name in part for part in process.cmdline()):
                    pids.add(process.pid)
        return pids

    def live_options(self) -> dict[str, float]:
        text = httpx.get(f"{self.url}/metrics").text
        lines = [line for line in text.splitlines() if line.startswith("stallfree_live_option{")]
        return {line.split('option="')[1].split('"')[0]: float(line.rpartition(" ")[2]) for line in lines}

    def is_refused(self) -> bool:
        lines = httpx.get(f"{self.url}/metrics").text.splitlines()
        return any(line.startswith("stallfree_user_config_refused{") and line.endswith(" 1.0") for line in lines)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    folder = tmp_path_factory.mktemp("deploy")
    model = save_tiny_tokenizer(save_tiny_model(folder / "tiny", "llama"))
    prepare_ray_environment(Path(__file__).resolve().parents[1])
    with local_ray(
        include_dashboard=True, dashboard_port=free_port(), object_store_memory=OBJECT_STORE_BYTES
    ) as started:
        ray.init(address=started.address, log_to_driver=False)
        try:
            yield Cluster(folder, model, started.dashboard, started.address, free_port())
        finally:
            serve.shutdown()
            ray.shutdown()


@contextmanager
def streaming(url: str) -> Iterator[Callable[[], str]]:
    """A stream that runs beside the block; the call says what came of it when it has ended."""
    pieces: list[str] = []
    body = {"model": "tiny", "prompt": "x" * 40, "max_tokens": 1500, "stream": True, "ignore_eos": True}

    def read() -> None:
        with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=120) as response:
            pieces.extend(response.iter_text())

    thread = threading.Thread(target=read)
    thread.start()
    wait_until(lambda: bool(pieces), 20.0)

    def whole() -> str:
        thread.join(120.0)
        return "".join(pieces)

    yield whole
    thread.join(120.0)


def is_running(cluster: Cluster) -> bool:
    return cluster.status().status == "RUNNING"


def test_a_deployed_file_is_running_and_serves_and_its_user_config_holds(cluster: Cluster) -> None:
    cluster.serve("deploy", str(cluster.config({"max_num_seqs": 4})), "-a", cluster.dashboard)
    wait_until(lambda: is_running(cluster), START_TIMEOUT_S)
    status = yaml.safe_load(cluster.serve("status", "-a", cluster.dashboard))["applications"]["stallfree"]
    assert status["status"] == "RUNNING"
    assert {deployment["status"] for deployment in status["deployments"].values()} == {"HEALTHY"}
    answer = httpx.post(f"{cluster.url}/v1/completions", json={"model": "tiny", "prompt": "Hello", "max_tokens": 3})
    assert answer.status_code == 200
    wait_until(lambda: cluster.live_options().get("max_num_seqs") == 4, 10.0)


def test_a_new_user_config_holds_in_the_same_process_while_a_stream_goes_on(cluster: Cluster) -> None:
    pids = cluster.worker_pids()
    assert len(pids) == 1
    with streaming(cluster.url) as whole:
        cluster.deploy(cluster.config({"max_num_seqs": 2, "max_num_batched_tokens": 48, "max_queued_requests": 3}))
        wait_until(lambda: cluster.live_options()["max_num_batched_tokens"] == 48, 15.0)
        assert cluster.live_options()["max_num_seqs"] == 2
        assert cluster.live_options()["max_queued_requests"] == 3
        assert whole().rstrip().endswith("data: [DONE]")
    assert cluster.worker_pids() == pids


@pytest.mark.parametrize("wrong", [{"max_num_seqs": 3, "block_size": 4}, {"max_num_seqs": 9}])
def test_a_wrong_user_config_shows_and_changes_nothing(cluster: Cluster, wrong: dict[str, int]) -> None:
    pids, before = cluster.worker_pids(), cluster.live_options()
    cluster.deploy(cluster.config(wrong))
    wait_until(cluster.is_refused, 15.0)
    assert cluster.live_options() == before
    wait_until(lambda: is_running(cluster), 15.0)
    assert cluster.worker_pids() == pids
    cluster.deploy(cluster.config({"max_num_seqs": 2, "max_num_batched_tokens": 48, "max_queued_requests": 3}))
    wait_until(lambda: not cluster.is_refused(), 15.0)


def test_without_user_config_the_arguments_hold_again(cluster: Cluster) -> None:
    pids = cluster.worker_pids()
    cluster.deploy(cluster.config())
    wait_until(lambda: cluster.live_options()["max_num_seqs"] == 8, 15.0)
    assert cluster.worker_pids() == pids


def test_other_arguments_start_new_workers(cluster: Cluster) -> None:
    pids = cluster.worker_pids()
    cluster.deploy(cluster.config(max_num_seqs=6))
    wait_until(lambda: is_running(cluster) and not cluster.worker_pids() & pids, START_TIMEOUT_S)
    wait_until(lambda: cluster.live_options().get("max_num_seqs") == 6, 15.0)


def test_wrong_arguments_fail_by_name_and_what_runs_goes_on(cluster: Cluster) -> None:
    cluster.deploy(cluster.config(max_num_sequences=6))
    wait_until(lambda: cluster.status().status == "DEPLOY_FAILED", START_TIMEOUT_S)
    assert "max_num_sequences" in cluster.status().message
    answer = httpx.post(f"{cluster.url}/v1/completions", json={"model": "tiny", "prompt": "Hello", "max_tokens": 3})
    assert answer.status_code == 200


def test_serve_run_takes_the_builder_with_arguments(cluster: Cluster) -> None:
    serve.delete("stallfree")
    cluster.serve(
        *("run", "deployments.app:build", f"model={cluster.model}", "metrics_port=0", "num_threads=1"),
        *("--name", "stallfree", "--address", cluster.gcs, "--non-blocking"),
    )
    wait_until(lambda: is_running(cluster), START_TIMEOUT_S)
    began_s = time.monotonic()
    assert httpx.get(f"{cluster.url}/ready").status_code == 200
    assert time.monotonic() - began_s < 5


def test_stallfree_serve_uses_a_running_cluster_and_leaves_it_as_it_was(cluster: Cluster) -> None:
    serve.delete("stallfree")
    command = [sys.executable, "-m", "deployments.cli.main", "serve", "--address", cluster.gcs, "--metrics-port", "0"]
    command += ["--model", str(cluster.model), "--port", str(cluster.port), "--num-threads", "1"]
    with (cluster.folder / "serve.log").open("w") as log:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True)
    try:
        assert process.stdout is not None
        assert process.stdout.readline().startswith("Serving tiny at "), (cluster.folder / "serve.log").read_text()
        assert is_running(cluster)
        assert httpx.get(f"{cluster.url}/ready").status_code == 200
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=COMMAND_TIMEOUT_S)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 0
    assert "stallfree" not in serve.status().applications
    assert ray.get(ray.remote(lambda: 7).options(num_cpus=0).remote()) == 7


def test_serve_build_writes_a_file_that_serve_takes(tmp_path: Path) -> None:
    path = tmp_path / "built.yaml"
    ended = subprocess.run(
        [str(SERVE_PROGRAM), "build", "deployments.app:app", "-o", str(path)],
        capture_output=True,
        text=True,
        timeout=COMMAND_TIMEOUT_S,
    )
    assert ended.returncode == 0, ended.stderr
    application = yaml.safe_load(path.read_text())["applications"][0]
    assert application["import_path"] == "deployments.app:app"
    assert {deployment["name"] for deployment in application["deployments"]} == {"Worker", "Ingress"}
