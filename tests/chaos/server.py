"""A Ray cluster with one application, deployed and changed through Serve's REST interface, and what can be seen and
done from outside of it.

Owns processes and addresses. Knows nothing of requests.
"""

import contextlib
import logging
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import ray
from ray import serve
from ray.dashboard.modules.serve.sdk import ServeSubmissionClient

from deployments.app import INGRESS_NAME, WORKER_NAME
from deployments.cli.local_ray import OBJECT_STORE_BYTES
from deployments.config import prepare_ray_environment
from tests.chaos.application import NOTES_VARIABLE
from tests.end_to_end.scrape import Scrape
from tests.ray_start import local_ray
from tests.server_process import free_port, wait_until

APP_NAME = "chaos"
_START_TIMEOUT_S = 120.0
_NAMESPACE = "serve"


class ChaosServer:
    """`args` are those of `tests.chaos.application:build`; `deployments` Serve's own overrides, by deployment."""

    def __init__(self, rest: ServeSubmissionClient, port: int, notes: Path, args: dict[str, Any]) -> None:
        self.url = f"http://127.0.0.1:{port}"
        self.args = args
        self._rest = rest
        self._port = port
        self._notes = notes

    # -- the application -----------------------------------------------------------------------------------------

    def deploy(self, deployments: dict[str, dict[str, Any]] | None = None, **changed_args: Any) -> None:
        """Returns when Serve has taken the configuration in."""
        self.args = self.args | changed_args
        application = {
            "name": APP_NAME,
            "route_prefix": "/",
            "import_path": "tests.chaos.application:build",
            "args": self.args,
            "deployments": [{"name": name, **options} for name, options in (deployments or {}).items()],
        }
        config = {
            "proxy_location": "HeadOnly",
            "http_options": {"host": "127.0.0.1", "port": self._port},
            "applications": [application],
        }
        self._rest.deploy_applications(config)

    def application(self) -> dict[str, Any]:
        """As Serve's REST interface describes it."""
        described: dict[str, Any] = self._rest.get_serve_details()["applications"].get(APP_NAME, {"status": "NONE"})
        return described

    def wait_until_running(self, timeout_s: float = _START_TIMEOUT_S) -> None:
        def is_running() -> bool:
            seen = self.application()
            assert seen["status"] != "DEPLOY_FAILED", seen
            return bool(seen["status"] == "RUNNING")

        wait_until(is_running, timeout_s)

    def replicas(self, deployment: str) -> list[dict[str, Any]]:
        """Those that run. None are named while Serve takes a new configuration in."""
        described = self.application()["deployments"].get(deployment, {"replicas": []})
        return [replica for replica in described["replicas"] if replica["state"] == "RUNNING"]

    def worker_pids(self) -> list[int]:
        return [replica["pid"] for replica in self.replicas(WORKER_NAME)]

    def ingress_pids(self) -> list[int]:
        return [replica["pid"] for replica in self.replicas(INGRESS_NAME)]

    # -- what it holds -------------------------------------------------------------------------------------------

    def request_ids(self, pid: int) -> set[str]:
        """All requests that this worker process was ever given; a further attempt counts as the request itself."""
        path = self._notes / str(pid)
        lines = path.read_text().split() if path.exists() else []
        return {line.partition("~")[0] for line in lines}

    def scrape(self) -> Scrape:
        response = httpx.get(f"{self.url}/metrics", timeout=10)
        assert response.status_code == 200
        return Scrape(response.text)

    def num_ongoing(self) -> int:
        """What Serve counts as under way in all replicas that run."""
        names = [replica["actor_name"] for name in (WORKER_NAME, INGRESS_NAME) for replica in self.replicas(name)]
        actors = [ray.get_actor(name, namespace=_NAMESPACE) for name in names]
        return sum(ray.get([actor.get_num_ongoing_requests.remote() for actor in actors]))

    def is_idle(self) -> bool:
        return self.scrape().is_idle and self.num_ongoing() == 0


@contextlib.contextmanager
def chaos_server(
    args: dict[str, Any],
    environment: dict[str, str] | None = None,
    deployments: dict[str, dict[str, Any]] | None = None,
) -> Iterator[ChaosServer]:
    """Running and ready; everything that it started ends with the block. `environment` is for Ray's processes."""
    notes = Path(tempfile.mkdtemp(prefix="chaos-notes-"))
    logging.getLogger("ray.serve").setLevel(logging.ERROR)
    with contextlib.ExitStack() as ends:
        with _environment({**(environment or {}), NOTES_VARIABLE: str(notes)}):
            started = ends.enter_context(
                local_ray(include_dashboard=True, dashboard_port=free_port(), object_store_memory=OBJECT_STORE_BYTES)
            )
            ray.init(address=started.address, log_to_driver=False, logging_level=logging.ERROR)
        ends.callback(ray.shutdown)
        server = ChaosServer(ServeSubmissionClient(started.dashboard), free_port(), notes, args)
        try:
            server.deploy(deployments)
            server.wait_until_running()
            yield server
        finally:
            with contextlib.suppress(Exception):
                serve.shutdown()


@contextlib.contextmanager
def _environment(variables: dict[str, str]) -> Iterator[None]:
    """What Ray's processes need and these variables, until the end of the block."""
    before = dict(os.environ)
    prepare_ray_environment(Path(__file__).resolve().parents[2])
    os.environ.update(variables)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
