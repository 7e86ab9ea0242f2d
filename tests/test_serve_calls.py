"""Calls to workers, made while an HTTP request is answered, through Serve's own routing: each finds its own way."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Generator
from types import SimpleNamespace
from typing import Any

import pytest
from ray.serve._private.common import DeploymentHandleSource, DeploymentID, ReplicaID
from ray.serve._private.default_impl import get_request_metadata
from ray.serve._private.handle_options import DynamicHandleOptions
from ray.serve._private.request_router.common import PendingRequest
from ray.serve.context import _RequestContext, _serve_request_context

from deployments import readiness, router_state
from deployments.readiness import ReadyProbe
from deployments.router import LoadRouter
from deployments.router_state import RouterState
from deployments.serve_client import ClientTimeouts, ServeWorkerClient

WORKER = DeploymentID("Worker", "app")
TIMEOUTS = ClientTimeouts(accept_s=0.5, stall_s=0.1, step_s=60.0)
INIT_OPTIONS = SimpleNamespace(_source=DeploymentHandleSource.REPLICA, _run_router_in_separate_loop=False)


class Replica:
    """As much of Serve's `RunningReplica` as routing looks at. One that is stuck takes calls and answers none; Serve
    asks it first where it does not know its queue (`is_known`)."""

    max_ongoing_requests = 1000

    def __init__(self, name: str, *, is_stuck: bool, is_known: bool = True) -> None:
        self.replica_id = ReplicaID(name, WORKER)
        self.replica_metadata: dict[str, Any] = {}
        self._is_stuck, self._is_known = is_stuck, is_known
        self.answered: list[str] = []

    async def get_queue_len(self, *, deadline_s: float) -> int:
        if self._is_stuck and not self._is_known:
            await asyncio.Event().wait()
        return 0

    async def call(self, method: str) -> None:
        if self._is_stuck:
            await asyncio.Event().wait()
        self.answered.append(method)


class Response:
    """What Serve's handle gives for a call: it is routed, and then the replica that it was routed to answers."""

    def __init__(self, router: LoadRouter, pending: PendingRequest) -> None:
        self._router, self._pending = router, pending
        self._task = asyncio.create_task(self._run())

    async def _run(self) -> None:
        replica: Any = await self._router._choose_replica_for_request(self._pending)
        await replica.call(self._pending.metadata.call_method)

    def __await__(self) -> Generator[Any, None, None]:
        return self._task.__await__()

    def cancel(self) -> None:
        self._task.cancel()


class Handle:
    """A deployment handle as far as routing goes: Serve makes the call's metadata, and its router chooses."""

    def __init__(self, router: LoadRouter, options: DynamicHandleOptions) -> None:
        self._router, self._options = router, options

    def options(self, **options: Any) -> "Handle":
        return Handle(self._router, self._options.copy_and_update(**options))

    def remote(self, *args: Any, **kwargs: Any) -> Response:
        metadata = get_request_metadata(INIT_OPTIONS, self._options)
        return Response(self._router, PendingRequest(list(args), kwargs, metadata))


@pytest.fixture
def state(monkeypatch: pytest.MonkeyPatch) -> RouterState:
    """A registry of its own for each test, where the router looks for it."""
    fresh = RouterState()
    monkeypatch.setattr(router_state, "ROUTER_STATE", fresh)
    return fresh


def in_an_http_request(
    state: RouterState, replicas: list[Replica], work: Callable[[ServeWorkerClient], Awaitable[Any]]
) -> Any:
    """What `work` returns, done by the handler of one HTTP request."""

    async def scenario() -> Any:
        router = LoadRouter(WORKER, DeploymentHandleSource.REPLICA, use_replica_queue_len_cache=True)
        router.initialize_state()
        router.update_replicas(replicas)  # type: ignore[arg-type]
        await asyncio.sleep(0.01)  # Serve asks new replicas for their queues
        client = ServeWorkerClient(Handle(router, DynamicHandleOptions()), TIMEOUTS, state)  # type: ignore[arg-type]
        token = _serve_request_context.set(_RequestContext(request_id="http", _internal_request_id="http"))
        try:
            return await work(client)
        finally:
            _serve_request_context.reset(token)

    return asyncio.run(scenario())


@pytest.mark.parametrize("is_known", [True, False])
@pytest.mark.parametrize("stuck", ["a", "b", "c", "ab", "bc"])
def test_a_worker_that_hangs_keeps_no_other_from_saying_that_it_is_ready(
    state: RouterState, stuck: str, is_known: bool
) -> None:
    replicas = [Replica(name, is_stuck=name in stuck, is_known=is_known) for name in "abc"]

    async def ask(client: ServeWorkerClient) -> bool:
        return await ReadyProbe(state.running_ids, client.check_ready).is_ready()

    began_s = time.monotonic()
    assert in_an_http_request(state, replicas, ask) is True
    assert time.monotonic() - began_s < readiness.ANSWER_TIMEOUT_S / 2


@pytest.mark.parametrize("stuck", ["a", "b", "c"])
def test_every_kind_of_call_reaches_the_workers_that_answer_past_one_that_hangs(state: RouterState, stuck: str) -> None:
    replicas = [Replica(name, is_stuck=name == stuck) for name in "abc"]

    async def call_all(client: ServeWorkerClient) -> None:
        calls: list[asyncio.Task[Any]] = []
        for name in state.running_ids():
            client._replica_of[f"request {name}"] = name
            calls += [
                asyncio.create_task(client.check_ready(name)),
                asyncio.create_task(client.life(f"request {name}", name)),
                asyncio.create_task(client.finish(f"request {name}", 0, 1)),
                asyncio.create_task(client.abort(f"request {name}")),
            ]
        _, hanging = await asyncio.wait(calls, timeout=0.3)
        assert len(hanging) == 4
        for call in hanging:
            call.cancel()
        await asyncio.gather(*calls, return_exceptions=True)

    in_an_http_request(state, replicas, call_all)
    for replica in replicas:
        methods = [] if replica.replica_id.unique_id == stuck else ["abort", "describe", "finish", "life"]
        assert sorted(replica.answered) == methods
