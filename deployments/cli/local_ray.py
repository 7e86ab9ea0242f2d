"""Ray and Serve as `stallfree serve` starts and stops them. Knows nothing of models or options.

Owns the promise that whatever was started here is gone afterwards, and that Ray's own chatter stays out of the
terminal.
"""

import asyncio
import contextlib
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import ray
from ray import serve
from ray.exceptions import RayError
from ray.serve import Application
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle

from deployments.app import INGRESS_NAME
from deployments.cli.ray_watch import RayWatch, end_with_ray, ending_ray
from deployments.config import prepare_ray_environment
from monitoring import metrics_actor

logger = logging.getLogger(__name__)

APP_NAME = "stallfree"
#: Ray's shared-memory store: nothing of ours goes through it but start-up messages
OBJECT_STORE_BYTES = 100 * 2**20
#: what is left of a local cluster so long after its end is killed
_REMAINS_TIMEOUT_S = 10.0
#: for an ingress replica to end the answers whose time is over, and to say so
_DRAIN_MARGIN_S = 5.0
_CONTROLLER_NAME = "SERVE_CONTROLLER_ACTOR"


class StartError(RuntimeError):
    """The application could not be started; the message is one line for the operator."""


class RunningApp:
    """Ray, Serve and the application, as far as this process started them. `stop` undoes it, once or twice."""

    def __init__(self, address: str | None) -> None:
        self._address = address
        self._started_serve = False
        self._deployed = False
        self._serves = False
        self._say_that_it_ended: Callable[[str], None] | None = None
        self._watch: RayWatch | None = None

    def start_ray(self, say_that_it_ended: Callable[[str], None] | None = None) -> None:
        """Connects to the cluster at the given address, or starts one here that ends with this process.

        Given `say_that_it_ended`, this process ends with one that was started here: should that end before `stop_ray`
        is called, or not end by it, it is called in another thread with the reason, what is left is killed, and the
        exit status is 1.
        """
        self._say_that_it_ended = say_that_it_ended if self._address is None else None
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
            needs_token = self._address is not None and "RAY_AUTH_MODE" not in os.environ
            hint = ". If that cluster asks for a token, set RAY_AUTH_MODE=token" if needs_token else ""
            raise StartError(f"Ray: {_last_line(str(error))}{hint}") from error
        if self._say_that_it_ended is not None:
            self._watch = end_with_ray(self._say_that_it_ended)

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
            self._serves = True
        except (RuntimeError, RayServeException) as error:
            raise StartError(_failure()) from error

    def stop_app(self, drain_timeout_s: float = 0.0) -> None:
        """Lets running answers have `drain_timeout_s` to end; those that go on get an error, and then all ends."""
        if not ray.is_initialized():
            return
        try:
            if self._serves:
                asyncio.run(_drain(drain_timeout_s))
        except KeyboardInterrupt:
            # A cluster of our own ends with everything in it; one that others use must not keep the application.
            if self._address is not None:
                serve.delete(APP_NAME, _blocking=False)
            raise
        if self._deployed:
            # First, as a shutdown of Serve ends the proxy, and with it every stream, before any replica has drained.
            _delete_app()
            metrics_actor.remove(APP_NAME)
        if self._started_serve:
            serve.shutdown()  # type: ignore[no-untyped-call]
        self._started_serve = self._deployed = self._serves = False

    def stop_ray(self) -> None:
        """Leaves the cluster; a local one ends, with every process that it started."""
        if self._watch is not None:
            self._watch.end()
        started = psutil.Process().children(recursive=True) if self._address is None else []
        say = self._say_that_it_ended
        with ending_ray(say) if say is not None else contextlib.nullcontext():
            ray.shutdown()
        _, alive = psutil.wait_procs(started, timeout=_REMAINS_TIMEOUT_S)
        for process in alive:
            process.kill()
        psutil.wait_procs(alive, timeout=_REMAINS_TIMEOUT_S)


async def _drain(timeout_s: float) -> None:
    """Every ingress replica takes nothing on any more and sees its answers to their end, or ends them. Serve has no
    hook at which a replica could do that by itself. A coroutine, since a handle may need a running loop."""
    ingress: DeploymentHandle[Any] = serve.get_deployment_handle(INGRESS_NAME, app_name=APP_NAME)
    if not ingress.is_initialized:
        # Serve ends its handles later, when this loop has ended: whatever the environment says, not on this one.
        ingress._init(_run_router_in_separate_loop=True)  # type: ignore[no-untyped-call]
    try:
        await ingress.broadcast("drain", timeout_s).results_async(
            timeout_s=timeout_s + _DRAIN_MARGIN_S, return_exceptions=True
        )
    except (RayError, RayServeException, TimeoutError) as error:
        logger.warning("the ingress could not be told to drain: %r", error)


def _delete_app() -> None:
    """Returns when the last replica has ended: by itself, or by Serve at the end of its drain time."""
    while True:
        # Serve's own call gives up after a minute, which may be less than the drain time.
        with contextlib.suppress(TimeoutError):
            serve.delete(APP_NAME)
            return


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
