"""What the API does when workers fail and when clients leave."""

import asyncio
import logging
import time
from typing import Any

import pytest

from deployments import answers
from deployments.worker_client import RequestRejectedError, WorkerFailedError, WorkerUnavailableError
from tests.api_client import MODEL, Api, answering, stream_events


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("route", ["complete", "chat"])
def test_a_rejected_request_is_the_clients_error_in_both_modes(route: str, stream: bool) -> None:
    api = answering("the", reject=RequestRejectedError("needs 9 blocks of 8", "never_fits", "prompt"))
    response = getattr(api, route)(stream=stream)
    assert response.status_code == 400
    assert response.json()["error"] == {
        "message": "needs 9 blocks of 8",
        "type": "invalid_request_error",
        "param": "prompt",
        "code": "never_fits",
    }
    assert api.metrics.finished == []


@pytest.mark.parametrize("stream", [False, True])
def test_no_worker_is_503_with_retry_after(stream: bool) -> None:
    api = answering("the", reject=WorkerUnavailableError("no worker is available"))
    response = api.chat(stream=stream)
    assert response.status_code == 503
    assert response.headers["retry-after"]
    assert response.json()["error"]["type"] == "server_error"
    assert [reason for reason, _ in api.metrics.finished] == ["error"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("fault", [{"error": WorkerFailedError("died")}, {"engine_error": "cannot grow"}])
def test_a_failure_before_the_first_token_is_an_http_status(stream: bool, fault: dict[str, Any]) -> None:
    api = answering("the", **fault)
    response = api.complete(stream=stream)
    assert response.status_code == 500
    assert response.json()["error"]["code"] == "worker_failed"
    assert [reason for reason, _ in api.metrics.finished] == ["error"]


@pytest.mark.parametrize("route", ["complete", "chat"])
@pytest.mark.parametrize("fault", [{"error": WorkerFailedError("died")}, {"engine_error": "cannot grow"}])
def test_a_failure_inside_a_stream_is_an_error_event_and_no_done(
    route: str, fault: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    api = answering("the cat sat on the mat", fail_after=3, **fault)
    with caplog.at_level(logging.ERROR):
        events = stream_events(getattr(api, route)(stream=True))
    *chunks, error = events
    assert error["error"]["type"] == "server_error"
    assert all(choice["finish_reason"] is None for chunk in chunks for choice in chunk["choices"])
    assert "stream" in caplog.text
    assert api.worker.num_open == 0
    assert [reason for reason, _ in api.metrics.finished] == ["error"]
    assert len(api.metrics.ttfts_s) == 1


def test_a_failure_after_some_tokens_of_a_whole_answer_is_500() -> None:
    response = answering("the cat sat", fail_after=3, error=WorkerFailedError("died")).chat()
    assert response.status_code == 500
    assert response.json()["error"]["message"] == "died"


def test_a_stream_of_frames_that_just_ends_is_a_failure() -> None:
    api = answering("the")
    api.worker._events = lambda request: []  # type: ignore[method-assign]
    assert api.complete().json()["error"]["code"] == "worker_failed"


@pytest.mark.parametrize("stream", [False, True])
def test_a_fault_of_our_own_is_an_error_object_that_tells_nothing(
    stream: bool, caplog: pytest.LogCaptureFixture
) -> None:
    api = answering("the cat sat", fail_after=2 if stream else 0, error=KeyError("secret"))
    with caplog.at_level(logging.ERROR):
        response = api.complete(stream=stream)
    assert "internal error" in response.text
    assert "secret" not in response.text
    assert "secret" in caplog.text
    assert "[DONE]" not in response.text


def test_one_failed_prompt_ends_its_siblings_and_leaves_nothing_open() -> None:
    api = answering("the cat sat on the mat", fail_after=3, error=WorkerFailedError("died"), delay_s=0.01)
    assert api.complete(prompt=["a", "b", "c"]).status_code == 500
    assert api.worker.num_open == 0
    assert len(api.metrics.finished) == 3


async def ask_and_leave(api: Api, path: str, body: bytes, *, leave_after_events: int | None) -> list[bytes]:
    """Asks over bare ASGI and closes the connection after so many pieces of the answer (None: 50 ms after asking)."""
    leave = asyncio.Event()
    pieces: list[bytes] = []
    is_asked = False

    async def receive() -> dict[str, Any]:
        nonlocal is_asked
        if not is_asked:
            is_asked = True
            return {"type": "http.request", "body": body, "more_body": False}
        await leave.wait()
        return {"type": "http.disconnect"}

    async def send(message: dict[str, Any]) -> None:
        if message["type"] == "http.response.body" and message.get("body"):
            pieces.append(message["body"])
            if len(pieces) == leave_after_events:
                leave.set()

    scope = {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "method": "POST",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "headers": [],
        "scheme": "http",
        "client": ("127.0.0.1", 1),
        "server": ("127.0.0.1", 2),
        "root_path": "",
    }
    asked = asyncio.ensure_future(api.app(scope, receive, send))
    if leave_after_events is None:
        await asyncio.sleep(0.05)
        leave.set()
    async with asyncio.timeout(2):
        await asked
    return pieces


def completion_body(stream: str, prompt: str = '"a"') -> bytes:
    return f'{{"model": "{MODEL}", "prompt": {prompt}, "stream": {stream}, "ignore_eos": true}}'.encode()


@pytest.mark.parametrize("prompt", ['"a"', '["a", "b", "c"]'])
def test_a_client_that_leaves_mid_stream_ends_the_workers_work(prompt: str) -> None:
    api = answering("the cat", is_endless=True, delay_s=0.005, settings={"max_model_len": 10_000})
    body = completion_body("true", prompt)
    pieces = asyncio.run(ask_and_leave(api, "/v1/completions", body, leave_after_events=3))
    assert len(pieces) >= 3
    assert api.worker.num_open == 0
    assert set(api.worker.aborted) == {request.request_id for request in api.worker.requests}
    assert api.worker.num_produced < 60
    assert {reason for reason, _ in api.metrics.finished} == {"abort"}


@pytest.mark.parametrize("stream", ["true", "false"])
def test_a_client_that_leaves_before_the_first_token_ends_the_workers_work(stream: str) -> None:
    api = answering("the cat", is_endless=True, delay_s=30, settings={"max_model_len": 10_000})
    asyncio.run(ask_and_leave(api, "/v1/completions", completion_body(stream), leave_after_events=None))
    assert api.worker.num_open == 0
    assert api.worker.aborted == [api.worker.requests[0].request_id]
    assert [reason for reason, _ in api.metrics.finished] == ["abort"]


@pytest.mark.parametrize("stream", ["true", "false"])
@pytest.mark.parametrize("delay_s", [0.005, 30])
def test_a_cancelled_request_ends_the_workers_work(stream: str, delay_s: float) -> None:
    """Serve cancels the task of a request whose client has gone."""
    api = answering("the cat", is_endless=True, delay_s=delay_s, settings={"max_model_len": 10_000})

    async def main() -> None:
        asked = asyncio.ensure_future(
            ask_and_leave(api, "/v1/completions", completion_body(stream), leave_after_events=10**9)
        )
        await asyncio.sleep(0.05)
        asked.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asked
        assert api.worker.num_open == 0

    asyncio.run(main())
    assert api.worker.aborted == [api.worker.requests[0].request_id]
    assert [reason for reason, _ in api.metrics.finished] == ["abort"]


def test_a_write_to_a_closed_connection_ends_the_workers_work() -> None:
    api = answering("the cat", is_endless=True, settings={"max_model_len": 10_000})

    async def main() -> None:
        is_asked = False

        async def receive() -> dict[str, Any]:
            nonlocal is_asked
            if is_asked:
                await asyncio.Event().wait()
            is_asked = True
            return {"type": "http.request", "body": completion_body("true"), "more_body": False}

        async def send(message: dict[str, Any]) -> None:
            if message["type"] == "http.response.body":
                raise OSError("connection closed")

        scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": [], "query_string": b""}
        await api.app(scope | {"server": ("x", 1), "scheme": "http", "root_path": ""}, receive, send)

    asyncio.run(main())
    assert api.worker.num_open == 0
    assert len(api.worker.aborted) == 1


def test_many_streams_closed_at_odd_moments_leave_nothing_open() -> None:
    api = answering("the cat", is_endless=True, delay_s=0.001, settings={"max_model_len": 10_000})

    async def main() -> None:
        await asyncio.gather(
            *(
                ask_and_leave(api, "/v1/completions", completion_body("true"), leave_after_events=number % 7 or None)
                for number in range(50)
            )
        )

    asyncio.run(main())
    assert api.worker.num_open == 0
    assert len(api.metrics.finished) == 50


def test_a_worker_that_cannot_be_told_does_not_spoil_the_answer(caplog: pytest.LogCaptureFixture) -> None:
    api = answering("one two three")

    async def failing_finish(request_id: str, index: int, num_tokens: int) -> None:
        raise WorkerUnavailableError("gone")

    api.worker.finish = failing_finish  # type: ignore[method-assign]
    events = stream_events(api.complete(stream=True, stop="two"))
    assert events[-1] == "[DONE]"
    assert "gone" in caplog.text
    assert api.worker.num_open == 0


@pytest.mark.parametrize("ends_by", [{"stop": "two"}, {"timeout": 0.1}])
def test_a_worker_that_hangs_when_it_is_told_holds_up_the_end_of_an_answer_but_shortly(
    monkeypatch: pytest.MonkeyPatch, ends_by: dict[str, Any]
) -> None:
    assert answers._TELL_WORKER_TIMEOUT_S <= 1.0
    monkeypatch.setattr(answers, "_TELL_WORKER_TIMEOUT_S", 0.1)
    api = answering("one two three", delay_s=30.0 if "timeout" in ends_by else 0.0)

    async def hangs(*_: object) -> None:
        await asyncio.Event().wait()

    api.worker.finish = api.worker.abort = hangs  # type: ignore[assignment,method-assign]
    began_s = time.monotonic()
    answer = api.complete(**ends_by)
    assert time.monotonic() - began_s < 1.0
    assert answer.status_code == (504 if "timeout" in ends_by else 200)
    assert api.worker.num_open == 0
