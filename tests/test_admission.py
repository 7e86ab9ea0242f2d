"""Whom an ingress takes in, how long they may take, and how it comes to an end."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from deployments.frames import Frame
from deployments.worker_client import RequestRejectedError, WorkerOverloadedError, WorkerUnavailableError
from tests.api_client import MODEL, Api, answering, stream_events
from worker.types import EngineRequest

LONG = {"max_model_len": 10_000}


def endless(delay_s: float = 0.01, **settings: Any) -> Api:
    return answering("the cat", is_endless=True, delay_s=delay_s, settings=LONG | settings)


async def ask(client: httpx.AsyncClient, **fields: Any) -> httpx.Response:
    return await client.post("/v1/completions", json={"model": MODEL, "prompt": "the", **fields})


async def until(condition: Any) -> None:
    async with asyncio.timeout(5):
        while not condition():
            await asyncio.sleep(0.005)


# -- full queues -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("route", ["complete", "chat"])
def test_full_queues_are_429_with_whole_seconds_to_wait(route: str, stream: bool) -> None:
    api = answering("the", reject=WorkerOverloadedError(2.3))
    response = getattr(api, route)(stream=stream)
    assert response.status_code == 429
    assert response.headers["retry-after"] == "3"
    assert response.json()["error"] == {
        "message": "the queues of all workers are full; there may be room in 3 s",
        "type": "rate_limit_error",
        "param": None,
        "code": "queue_full",
    }
    assert api.metrics.rejections == ["queue_full"]
    assert api.metrics.finished == []


def test_the_wait_is_at_least_a_second() -> None:
    assert answering("the", reject=WorkerOverloadedError(0.01)).complete().headers["retry-after"] == "1"


def test_one_of_several_prompts_that_finds_no_room_turns_the_call_away() -> None:
    api = answering("the cat")
    generate = api.worker.generate

    def generate_or_refuse(request: EngineRequest) -> AsyncIterator[list[Frame]]:
        if request.request_id.endswith("-2"):
            api.worker.reject = WorkerOverloadedError(4.0)
        return generate(request)

    api.worker.generate = generate_or_refuse  # type: ignore[method-assign]
    assert api.complete(prompt=["a", "b", "c"], stream=True).status_code == 429
    assert api.worker.num_open == 0


# -- open requests, and nobody to serve them ---------------------------------------------------------------------


def test_more_open_calls_than_the_limit_are_429_before_their_body_is_read() -> None:
    api = endless(max_open_requests=2)

    async def scenario(client: httpx.AsyncClient) -> None:
        open_calls = [asyncio.create_task(ask(client, ignore_eos=True)) for _ in range(2)]
        await until(lambda: api.worker.num_open == 2)
        refused = await client.post("/v1/completions", content=b"no JSON at all")
        assert refused.status_code == 429
        assert refused.headers["retry-after"] == "1"
        assert refused.headers["x-request-id"]
        assert refused.json()["error"]["code"] == "too_many_open_requests"
        assert (await client.get("/health")).status_code == 200
        assert (await client.get("/ready")).status_code == 200
        for call in open_calls:
            call.cancel()
        await asyncio.gather(*open_calls, return_exceptions=True)
        await until(lambda: api.service.admission.num_open == 0)
        assert (await ask(client, max_tokens=2)).status_code == 200

    api.run(scenario)
    assert api.metrics.rejections == ["open_requests"]


def test_a_call_is_open_until_its_stream_has_ended() -> None:
    api = answering("the cat", delay_s=0.01, settings={"max_open_requests": 1})

    async def scenario(client: httpx.AsyncClient) -> list[int]:
        calls = [asyncio.create_task(ask(client, stream=True)) for _ in range(3)]
        return sorted([(await call).status_code for call in calls])

    assert api.run(scenario) == [200, 429, 429]
    assert api.service.admission.num_open == 0


def test_without_a_running_worker_a_call_is_503_at_once() -> None:
    api = answering("the")
    api.are_workers_running = False
    response = api.complete()
    assert (response.status_code, response.headers["retry-after"]) == (503, "1")
    assert response.json()["error"]["code"] == "worker_unavailable"
    assert api.worker.requests == []
    assert api.metrics.rejections == ["unavailable"]
    assert api.get("/v1/models").status_code == 200


def test_why_a_request_was_turned_away_is_counted() -> None:
    for worker, fields, reason in (
        ({"reject": WorkerUnavailableError("none")}, {}, "unavailable"),
        ({"reject": RequestRejectedError("never")}, {}, "refused"),
        ({}, {"prompt": [5] * 100}, "too_long"),
    ):
        api = answering("the", **worker)
        assert api.complete(**fields).status_code >= 400
        assert api.metrics.rejections == [reason]


# -- deadlines ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("settings", [{}, {"request_timeout_s": 100.0}])
def test_a_deadline_that_passes_before_the_first_token_is_504_and_frees_the_place(
    stream: bool, settings: dict[str, float]
) -> None:
    api = endless(delay_s=30, **settings)
    response = api.complete(stream=stream, timeout=0.05)
    assert response.status_code == 504
    assert response.json()["error"] == {
        "message": "the answer was not done within its 0.05 s",
        "type": "server_error",
        "param": "timeout",
        "code": "timeout",
    }
    assert api.worker.num_open == 0
    assert api.worker.aborted == [api.worker.requests[0].request_id]
    assert api.metrics.rejections == ["deadline"]
    assert [reason for reason, _ in api.metrics.finished] == ["error"]


def test_the_servers_limit_holds_where_a_request_asks_for_more_or_nothing() -> None:
    for fields in ({}, {"timeout": 60}):
        assert endless(delay_s=30, request_timeout_s=0.05).complete(**fields).status_code == 504


def test_a_deadline_that_passes_inside_a_stream_is_an_error_event() -> None:
    api = endless(delay_s=0.005)
    *chunks, error = stream_events(api.chat(stream=True, timeout=0.2))
    assert len(chunks) > 3
    assert error["error"]["code"] == "timeout"
    assert api.worker.num_open == 0
    assert len(api.worker.aborted) == 1
    assert api.metrics.rejections == []
    assert [reason for reason, _ in api.metrics.finished] == ["error"]


def test_a_whole_answer_that_is_not_done_in_time_is_504_however_much_there_was() -> None:
    assert endless(delay_s=0.005).complete(timeout=0.1).status_code == 504


def test_a_deadline_that_does_not_pass_changes_nothing() -> None:
    api = answering("the cat sat")
    assert api.complete(timeout=30).json()["choices"] == answering("the cat sat").complete().json()["choices"]


@pytest.mark.parametrize("timeout", [0, -1, "1", True, float("1e999")])
def test_a_deadline_must_be_a_number_above_zero(timeout: object) -> None:
    body = f'{{"model": "{MODEL}", "prompt": "a", "timeout": {timeout!r}}}'
    body = body.replace("'", '"').replace("True", "true").replace("inf", "1e999")
    response = answering("the").post("/v1/completions", content=body.encode())
    assert (response.status_code, response.json()["error"]["param"]) == (400, "timeout")


# -- the end -----------------------------------------------------------------------------------------------------


def test_a_drain_lets_short_answers_end_cuts_long_ones_with_an_error_and_takes_nobody_in() -> None:
    api = endless(delay_s=0.02)

    async def scenario(client: httpx.AsyncClient) -> None:
        short = asyncio.create_task(ask(client, stream=True, max_tokens=5))
        long = asyncio.create_task(ask(client, stream=True, max_tokens=5000))
        whole = asyncio.create_task(ask(client, max_tokens=5000))
        await until(lambda: api.worker.num_open == 3)
        drain = asyncio.create_task(api.service.admission.drain(0.5))
        await until(lambda: api.service.admission.is_draining)
        late = await ask(client)
        assert late.status_code == 503
        assert late.headers["retry-after"] == "1"
        assert late.json()["error"]["code"] == "server_stopping"
        assert (await client.get("/ready")).status_code == 503
        assert (await client.get("/health")).status_code == 200
        assert stream_events(await short)[-1] == "[DONE]"
        *chunks, error = stream_events(await long)
        assert len(chunks) > 5
        assert error["error"]["code"] == "server_stopping"
        assert (await whole).status_code == 503
        await drain

    api.run(scenario)
    assert api.worker.num_open == 0
    assert api.service.admission.num_open == 0
    assert api.metrics.rejections == ["draining"]


def test_a_drain_of_an_idle_ingress_returns_at_once() -> None:
    api = answering("the")

    async def scenario(client: httpx.AsyncClient) -> None:
        async with asyncio.timeout(1):
            await api.service.admission.drain(60)

    api.run(scenario)


def test_an_answer_that_begins_after_the_drain_has_ended_is_cut_off() -> None:
    """Its prompt was still being tokenized."""
    api = endless()

    async def scenario(client: httpx.AsyncClient) -> httpx.Response:
        await api.service.admission.drain(0)
        api.service.admission.is_draining = False
        return await ask(client)

    assert api.run(scenario).status_code == 503
    assert api.worker.num_open == 0


# -- probes ------------------------------------------------------------------------------------------------------


def test_probes_answer_head_requests_too() -> None:
    api = answering("the")
    for path in ("/health", "/ready"):
        head = api.run(lambda client, path=path: client.head(path))
        assert (head.status_code, head.text) == (200, "")
    api.is_ready = False
    assert api.run(lambda client: client.head("/ready")).status_code == 503
