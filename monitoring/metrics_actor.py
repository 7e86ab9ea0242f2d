"""The named Ray actor that keeps an application's metrics and newest steps, and its scrape port.

It outlives the workers and ingress replicas that push to it. Knows nothing of what they do.
"""

import logging
import time
from collections.abc import Callable, Iterable
from threading import Thread
from typing import Any, TypedDict
from wsgiref.simple_server import WSGIServer
from wsgiref.types import StartResponse, WSGIApplication, WSGIEnvironment

import ray
from prometheus_client import start_http_server
from ray.actor import ActorHandle

from monitoring.accumulator import Snapshot
from monitoring.dashboard_data import NowView, now_view
from monitoring.explanation_store import ExplanationStore, StoredExplanation
from monitoring.exposition import StoreCollector, registry_of, render
from monitoring.metrics_store import Inheritance, MetricsStore
from monitoring.step_feed import Row, StepBatch, StepFeed

logger = logging.getLogger(__name__)

NAMESPACE = "serve"
_HEAD_RESOURCE = "node:__internal_head__"
#: of the one that a head node has
_HEAD_SHARE = 0.001


class DashboardData(TypedDict):
    """`now_ms` is on the clock of the steps' `ended_ms` and, in seconds, of the requests' `ended_s`."""

    now_ms: float
    now: NowView
    steps: StepBatch
    newest: list[StoredExplanation]


class Window(TypedDict):
    """The newest past: rows of steps by worker, and requests that ended."""

    rows: dict[str, list[Row]]
    newest: list[StoredExplanation]


class MetricsActor:
    """The store behind remote calls. `port` 0 opens no scrape port; the ingress's `/metrics` works either way."""

    def __init__(self, host: str, port: int, *, with_vllm_names: bool = False) -> None:
        self._store = MetricsStore(time.monotonic)
        self._explanations = ExplanationStore(time.monotonic)
        self._collector = StoreCollector(self._store, with_vllm_names=with_vllm_names)
        self._registry = registry_of(self._collector)
        self._steps = StepFeed()
        self._address: tuple[str, int] | None = None
        self._server: tuple[WSGIServer, Thread] | None = None
        self.listen(host, port)

    def push(self, source: str, epoch: str, snapshot: Snapshot, inheritance: Inheritance | None = None) -> Inheritance:
        return self._store.push(source, epoch, snapshot, inheritance)

    def push_steps(self, worker: str, rows: list[Row]) -> None:
        self._steps.add(worker, rows, time.monotonic() * 1e3)

    def dashboard(self, cursor: int, store_id: str, num_requests: int) -> DashboardData:
        """What the page at `/dashboard` draws. The arguments are those of the last answer's `steps`, or 0 and ""."""
        steps = self._steps.since(cursor, store_id)
        newest = self._explanations.newest(num_requests)
        now_ms = round(time.monotonic() * 1e3, 1)
        return {"now_ms": now_ms, "now": now_view(self._store), "steps": steps, "newest": newest}

    def window(self, seconds: float, num_requests: int) -> Window:
        since_s = time.monotonic() - seconds
        newest = self._explanations.newest(num_requests, since_s)
        return {"rows": self._steps.ended_since(since_s * 1e3), "newest": newest}

    def drop(self, source: str, epoch: str | None = None) -> None:
        self._store.drop(source, epoch)

    def put_explanations(self, source: str, ended: list[StoredExplanation], holds_requests: bool) -> list[str]:
        return self._explanations.put(source, ended, holds_requests=holds_requests)

    def answer_explanation(self, request_id: str, running: list[StoredExplanation]) -> None:
        self._explanations.answer(request_id, running)

    def find_explanations(self, source: str, request_id: str) -> tuple[list[StoredExplanation], bool]:
        return self._explanations.find(source, request_id)

    def render(self) -> str:
        return render(self._registry)

    def show_vllm_names(self, *, is_wanted: bool) -> None:
        self._collector.with_vllm_names = is_wanted

    def listen(self, host: str, port: int) -> bool:
        """Serve scrapes at this address and no other. False: there is no scrape port, by wish or because the
        address is taken, which is logged once and no reason to count nothing; asking again tries again."""
        is_new_address = self._address != (host, port)
        if self._server is not None and not is_new_address:
            return True
        self._stop_listening()
        self._address = (host, port)
        if port == 0:
            return False
        try:
            server, thread = start_http_server(port, addr=host, registry=self._registry)
        except OSError as error:
            if is_new_address:
                logger.error(
                    "no scrape port for metrics at %s:%d (%s); /metrics of the HTTP server still works",
                    host,
                    port,
                    error,
                )
            return False
        app = server.get_app()
        assert app is not None
        server.set_app(_in_text_format(app))
        self._server = server, thread
        return True

    def _stop_listening(self) -> None:
        if self._server is not None:
            server, thread = self._server
            server.shutdown()
            server.server_close()
            thread.join()
            self._server = None


def _in_text_format(app: WSGIApplication) -> WSGIApplication:
    """Whatever is asked for: in OpenMetrics the library writes an underscore for the colon of a name."""

    def answer(environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        return app({**environ, "HTTP_ACCEPT": ""}, start_response)

    return answer


def actor_name(app_name: str) -> str:
    return f"stallfree-metrics-{app_name}"


def get_or_create(app_name: str, host: str, port: int, *, with_vllm_names: bool = False) -> ActorHandle[Any]:
    """The application's metrics actor, on the head node: its scrape port should stay put, and go along
    where a head that was lost is replaced.

    Any number of processes may call this at once; all get the same actor. The last caller's options hold."""
    options: dict[str, Any] = {
        "name": actor_name(app_name),
        "namespace": NAMESPACE,
        "get_if_exists": True,
        "lifetime": "detached",
        "num_cpus": 0,
        "max_restarts": -1,
    }
    if _has_head():
        # By a resource that every head has, not by the node's id, which a replacement has not.
        options["resources"] = {_HEAD_RESOURCE: _HEAD_SHARE}
    actor_class: Any = ray.remote(MetricsActor)
    actor: ActorHandle[Any] = actor_class.options(**options).remote(
        host, port, with_vllm_names=with_vllm_names
    )
    # An actor that was there already may listen elsewhere.
    actor.listen.remote(host, port)
    actor.show_vllm_names.remote(is_wanted=with_vllm_names)
    return actor


def _has_head() -> bool:
    list_nodes: Callable[[], list[dict[str, Any]]] = ray.nodes
    return any(node["Alive"] and _HEAD_RESOURCE in node["Resources"] for node in list_nodes())


def remove(app_name: str) -> None:
    """End the application's actor, and with it its history: for whoever takes the application down for good."""
    try:
        actor = ray.get_actor(actor_name(app_name), namespace=NAMESPACE)
    except ValueError:
        return
    ray.kill(actor)
