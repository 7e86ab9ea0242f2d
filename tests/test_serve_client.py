"""One attempt at a request, over a handle that is not Serve's: who is asked, what is lost, what is refused."""

import asyncio
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
from ray.exceptions import ActorUnavailableError

from deployments import serve_client
from deployments.frames import Accepted, Frame, Heartbeat, Overloaded, Tokens
from deployments.router_state import RouterState
from deployments.serve_client import ClientTimeouts, ServeWorkerClient
from deployments.worker_client import (
    RequestRejectedError,
    WorkerFailedError,
    WorkerLostError,
    WorkerOverloadedError,
    WorkerUnavailableError,
)
from deployments.worker_errors import is_worker_lost
from deployments.worker_service import WorkerDeadError
from scheduler.life_report import LifeReport
from tests.fake_worker import LOAD
from worker.types import EngineRequest, SamplingParams, TokenEvent

TIMEOUTS = ClientTimeouts(accept_s=0.5, stall_s=0.1, step_s=60.0, drain_grace_s=0.0)
UNAVAILABLE = ActorUnavailableError("gone", b"\0" * 16)

#: what a replica does with a call: items are yielded, exceptions raised, numbers waited for in seconds
Script = list[list[Frame] | BaseException | float]


class Response:
    """As much of Serve's response generator as the client uses."""

    def __init__(self, script: Script) -> None:
        self._items = self._play(script)
        self.is_cancelled = False
        self._replica_result_future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()

    def cancel(self) -> None:
        self.is_cancelled = True

    async def __anext__(self) -> list[Frame]:
        return await anext(self._items)

    async def _play(self, script: Script) -> AsyncGenerator[list[Frame], None]:
        for item in script:
            if isinstance(item, float):
                await asyncio.sleep(item)
            elif isinstance(item, BaseException):
                raise item
            else:
                yield item


@dataclass
class Handle:
    """Sends each call of `generate` to the first replica that the request does not avoid, as the router would; a
    replica plays its scripts one after the other, the last one again and again."""

    state: RouterState
    scripts: dict[str, list[Script]]
    asked: list[str] = field(default_factory=list)
    responses: list[Response] = field(default_factory=list)
    told: list[tuple[Any, ...]] = field(default_factory=list)
    method: str = ""
    #: what every call but `generate` raises
    failure: BaseException | None = None

    def options(self, method_name: str, **_: Any) -> "Handle":
        return Handle(self.state, self.scripts, self.asked, self.responses, self.told, method_name, self.failure)

    def remote(self, *args: Any, **kwargs: Any) -> Any:
        if self.method != "generate":
            self.told.append((self.method, *args, kwargs["target_replica"]))
            return self._answer()
        request: EngineRequest = args[0]
        avoided = self.state.avoided(request.request_id)
        replica = sorted(self.scripts, key=lambda name: name in avoided)[0]
        self.state.book(request.request_id, replica, len(request.prompt_token_ids))
        scripts = self.scripts[replica]
        script = scripts[min(self.asked.count(replica), len(scripts) - 1)]
        self.asked.append(replica)
        self.responses.append(Response(script))
        return self.responses[-1]

    async def _answer(self) -> None:
        if self.failure is not None:
            raise self.failure


def accepted(replica: str) -> list[Frame]:
    return [Accepted(0, replica)]


def tokens(*token_ids: int, **end: Any) -> list[Frame]:
    return [Tokens([TokenEvent("r", 0, list(token_ids), **end)], LOAD)]


def full(retry_after_s: float) -> list[Frame]:
    return [Overloaded(retry_after_s, LOAD)]


def ask(
    scripts: dict[str, list[Script]],
    *,
    during: Callable[[RouterState], None] = lambda state: None,
    timeouts: ClientTimeouts = TIMEOUTS,
) -> tuple[list[Frame], Handle]:
    """All frames; `during` is called with each list of them."""
    state = RouterState()
    state.replicas_changed(scripts, ())
    handle = Handle(state, scripts)

    async def scenario() -> list[Frame]:
        client = ServeWorkerClient(handle, timeouts, state)  # type: ignore[arg-type]
        frames: list[Frame] = []
        async for batch in client.generate(EngineRequest("r", [1, 2], SamplingParams(max_tokens=9))):
            frames += batch
            during(state)
        return frames

    try:
        return asyncio.run(scenario()), handle
    finally:
        assert state.num_open_requests == 0
        assert all(response.is_cancelled for response in handle.responses), "a stream was left alone"
        ASKED[:] = handle.asked


#: who was asked in the newest call of `ask`, also where that raised
ASKED: list[str] = []


def test_a_stream_is_handed_on_as_it_comes():
    frames, handle = ask({"a": [[accepted("a"), tokens(1), tokens(2, finish_reason="stop")]]})
    assert frames == accepted("a") + tokens(1) + tokens(2, finish_reason="stop")
    assert handle.asked == ["a"]


# --- before a worker has taken the request


def test_a_full_worker_is_asked_once_and_the_next_one_takes_the_request():
    frames, handle = ask({"a": [[full(3.0)]], "b": [[accepted("b"), tokens(1, finish_reason="stop")]]})
    assert frames[0] == Accepted(0, "b")
    assert handle.asked == ["a", "b"]


def test_when_all_are_full_the_shortest_wait_is_told():
    with pytest.raises(WorkerOverloadedError) as caught:
        ask({"a": [[full(3.0)]], "b": [[full(2.0)]], "c": [[full(7.0)]]})
    assert caught.value.retry_after_s == 2.0
    assert ASKED == ["a", "b", "c"]


@pytest.mark.parametrize("failure", [UNAVAILABLE, WorkerDeadError("stuck"), 5.0])
def test_a_worker_that_fails_before_it_took_the_request_is_followed_by_another_try(failure: BaseException | float):
    frames, handle = ask({"a": [[failure], [accepted("a"), tokens(1, finish_reason="stop")]]})
    assert frames[0] == Accepted(0, "a")
    assert handle.asked == ["a", "a"]


def test_a_request_that_nobody_takes_in_time_finds_no_worker():
    with pytest.raises(WorkerUnavailableError, match=r"within 0\.5 s"):
        ask({"a": [[UNAVAILABLE]]})
    assert len(ASKED) > 1


def test_an_error_of_the_workers_code_is_not_tried_again():
    with pytest.raises(WorkerFailedError) as caught:
        ask({"a": [[ValueError("wrong")]]})
    assert not isinstance(caught.value, WorkerLostError)
    assert ASKED == ["a"]


# --- once a worker holds it


@pytest.mark.parametrize(
    ("failure", "reason"),
    [
        (UNAVAILABLE, "died"),
        (WorkerDeadError("the engine loop is dead"), "died"),
        (asyncio.CancelledError(), "died"),
        (tokens(finish_reason="error", error="the engine died: boom", is_worker_lost=True), "died"),
        (5.0, "stalled"),
        ([Heartbeat(1, 61.0, LOAD)], "stalled"),
    ],
)
def test_a_lost_worker_is_told_from_a_failed_request(failure: Any, reason: str):
    with pytest.raises(WorkerLostError) as caught:
        ask({"a": [[accepted("a"), tokens(1), failure]]})
    assert (caught.value.reason, caught.value.replica_id) == (reason, "a")


def test_a_lost_worker_comes_last_for_others_too():
    states: list[RouterState] = []
    with pytest.raises(WorkerLostError):
        ask({"a": [[accepted("a"), UNAVAILABLE]]}, during=states.append)
    assert states[0].work("a").is_suspect


def test_what_the_worker_raises_by_itself_is_a_failed_request():
    with pytest.raises(WorkerFailedError) as caught:
        ask({"a": [[accepted("a"), RuntimeError("NaN")]]})
    assert not isinstance(caught.value, WorkerLostError)


def test_a_refusal_is_the_requests_own_fault():
    with pytest.raises(RequestRejectedError, match="too long"):
        ask({"a": [[accepted("a"), tokens(finish_reason="error", error="too long", is_refusal=True)]]})


def test_a_stopping_worker_hands_its_stream_over_when_another_one_is_there():
    with pytest.raises(WorkerLostError) as caught:
        ask(
            {"a": [[accepted("a"), tokens(1), tokens(2), tokens(3)]], "b": []},
            during=lambda state: state.replicas_changed({"b"}, {"a"}),
        )
    assert caught.value.reason == "drained"


def test_a_stopping_worker_without_a_successor_keeps_its_stream():
    frames, _ = ask(
        {"a": [[accepted("a"), tokens(1), tokens(2, finish_reason="stop")]]},
        during=lambda state: state.replicas_changed((), {"a"}),
    )
    assert len(frames) == 3


def test_a_stream_has_the_grace_to_end_by_itself():
    frames, _ = ask(
        {"a": [[accepted("a"), tokens(1), tokens(2, finish_reason="stop")]], "b": []},
        during=lambda state: state.replicas_changed({"b"}, {"a"}),
        timeouts=ClientTimeouts(0.5, 0.1, 60.0, drain_grace_s=5.0),
    )
    assert len(frames) == 3


@pytest.mark.parametrize(
    ("code", "is_lost"),
    [
        (grpc.StatusCode.CANCELLED, True),
        (grpc.StatusCode.INTERNAL, True),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, False),
        (grpc.StatusCode.INVALID_ARGUMENT, False),
    ],
)
def test_a_broken_connection_is_a_lost_worker_and_a_refused_message_is_not(code: grpc.StatusCode, is_lost: bool):
    error = grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata())
    assert is_worker_lost(error) is is_lost


def broken(code: grpc.StatusCode) -> grpc.aio.AioRpcError:
    return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata())


@pytest.mark.parametrize(
    "failure",
    [UNAVAILABLE, broken(grpc.StatusCode.CANCELLED), broken(grpc.StatusCode.INTERNAL), asyncio.CancelledError()],
)
def test_what_cannot_be_told_to_a_worker_or_asked_of_it_since_it_is_lost_is_no_failure(failure: BaseException):
    async def scenario() -> LifeReport | None:
        state = RouterState()
        client = ServeWorkerClient(Handle(state, {}, failure=failure), TIMEOUTS, state)  # type: ignore[arg-type]
        client._replica_of["r"] = "a"
        await client.finish("r", 0, 1)
        await client.abort("r")
        return await client.life("r", "a")

    assert asyncio.run(scenario()) is None


def test_our_own_cancellation_is_not_the_workers():
    async def scenario() -> bool:
        async def cancelled() -> bool:
            try:
                await asyncio.sleep(10)
            except asyncio.CancelledError as error:
                return is_worker_lost(error)
            return True

        task = asyncio.create_task(cancelled())
        await asyncio.sleep(0)
        task.cancel()
        return await task

    assert asyncio.run(scenario()) is False


class SentCall:
    def __init__(self) -> None:
        self.is_cancelled = False

    def cancel(self) -> None:
        self.is_cancelled = True


class UnfetchedResponse(Response):
    """The call was sent, and nobody has looked at it yet: what Serve's own `cancel` does then is nothing."""

    def __init__(self) -> None:
        super().__init__([60.0])
        self.call = SentCall()
        self._replica_result_future.set_result(self.call)

    def cancel(self) -> None:
        pass


def test_a_client_that_leaves_when_the_call_has_just_been_sent_ends_it() -> None:
    async def scenario() -> None:
        state = RouterState()
        handle = Handle(state, {})
        client = ServeWorkerClient(handle, TIMEOUTS, state)  # type: ignore[arg-type]
        response = UnfetchedResponse()
        client._generate = SimpleNamespace(remote=lambda request: response)  # type: ignore[assignment]
        reading = asyncio.create_task(anext(client.generate(EngineRequest("r", [1], SamplingParams(max_tokens=4)))))
        await asyncio.sleep(0)
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)
        assert response.call.is_cancelled

    asyncio.run(scenario())


@pytest.mark.parametrize("ends_by", ["failure", "cancel"])
def test_a_call_that_was_never_sent_can_be_left(ends_by: str) -> None:
    async def scenario() -> None:
        response = Response([60.0])
        if ends_by == "failure":
            response._replica_result_future.set_exception(RuntimeError("nobody was there"))
        else:
            response._replica_result_future.cancel()
        serve_client._cancel(response)  # type: ignore[arg-type]
        assert response.is_cancelled

    asyncio.run(scenario())
