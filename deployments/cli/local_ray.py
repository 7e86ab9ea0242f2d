"""Ray and Serve as `stallfree serve` starts and stops them. Knows nothing of models or options.

Owns the promise that whatever was started here is gone afterwards, and that Ray's own chatter stays out of the
terminal.
"""

import logging
from pathlib import Path

import psutil
import ray
from ray import serve
from ray.serve import Application
from ray.serve.exceptions import RayServeException

from deployments.config import prepare_ray_environment
from monitoring import metrics_actor

APP_NAME = "stallfree"
#: Ray's shared-memory store: nothing of ours goes through it but start-up messages
OBJECT_STORE_BYTES = 100 * 2**20
#: what is left of a local cluster so long after its end is killed
_REMAINS_TIMEOUT_S = 10.0
_CONTROLLER_NAME = "SERVE_CONTROLLER_ACTOR"


class StartError(RuntimeError):
    """The application could not be started; the message is one line for the operator."""


class RunningApp:
    """Ray, Serve and the application, as far as this process started them. `stop` undoes it, once or twice."""

    def __init__(self, address: str | None) -> None:
        self._address = address
        self._started_serve = False
        self._deployed = False

    def start_ray(self) -> None:
        """Connects to the cluster at the given address, or starts one here that ends with this process."""
        prepare_ray_environment(Path(__file__).resolve().parents[2])
        logging.getLogger("ray.serve").setLevel(logging.ERROR)
        try:
            if self._address is not None:
                ray.init(address=self._address, log_to_driver=False, logging_level=logging.ERROR)
                return
            ray.init(
                address="local",
                include_dashboard=False,
                log_to_driver=False,
                logging_level=logging.ERROR,
                object_store_memory=OBJECT_STORE_BYTES,
            )
        except (ConnectionError, RuntimeError, ValueError) as error:
            raise StartError(f"Ray: {_last_line(str(error))}") from error

    def deploy(self, app: Application, host: str, port: int) -> None:
        """Returns when the application is ready. Raises `StartError` with the reason if it cannot be."""
        if not _serve_is_running():
            self._started_serve = True
            # Several proxies on one machine would share one port.
            location = "HeadOnly" if self._address is None else "EveryNode"
            serve.start(proxy_location=location, http_options={"host": host, "port": port})
        self._deployed = True
        try:
            serve.run(app, name=APP_NAME)
        except (RuntimeError, RayServeException) as error:
            raise StartError(_failure()) from error

    def stop_app(self) -> None:
        """Lets running answers drain, as far as their time allows."""
        if not ray.is_initialized():
            return
        if self._started_serve:
            serve.shutdown()  # type: ignore[no-untyped-call]
        elif self._deployed:
            serve.delete(APP_NAME)
        if self._deployed:
            metrics_actor.remove(APP_NAME)
        self._started_serve = self._deployed = False

    def stop_ray(self) -> None:
        """Leaves the cluster; a local one ends, with every process that it started."""
        started = psutil.Process().children(recursive=True) if self._address is None else []
        ray.shutdown()
        _, alive = psutil.wait_procs(started, timeout=_REMAINS_TIMEOUT_S)
        for process in alive:
            process.kill()
        psutil.wait_procs(alive, timeout=_REMAINS_TIMEOUT_S)


def _failure() -> str:
    """Why the application is not running: the last line of its first failed deployment's traceback."""
    application = serve.status().applications[APP_NAME]
    messages = [deployment.message for deployment in application.deployments.values() if deployment.message]
    return _last_line(messages[0] if messages else application.message)


def _last_line(text: str) -> str:
    """The line of a traceback that says what happened."""
    lines = [line.strip() for line in text.strip().splitlines() if line.strip()]
    return lines[-1] if lines else "no reason was given"


def _serve_is_running() -> bool:
    return any(actor["name"] == _CONTROLLER_NAME for actor in ray.util.list_named_actors(all_namespaces=True))
