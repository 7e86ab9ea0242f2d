"""A stream begins with its first token, or with a comment if that takes long; it is never silent for long."""

import asyncio
from typing import Any

import pytest

from deployments.event_response import KEEP_ALIVE
from deployments.worker_client import RequestRejectedError, WorkerFailedError, WorkerOverloadedError
from tests.api_client import MODEL, Api, answering
from tests.test_api_failures import ask_and_leave, completion_body

KEEP_ALIVE_S = 0.05
COMMENT = KEEP_ALIVE.decode()


def slow(text: str = "the cat", delay_s: float = 0.0, **worker: Any) -> Api:
    return answering(text, delay_s=delay_s, settings={"keep_alive_s": KEEP_ALIVE_S}, **worker)


def test_a_stream_that_waits_for_its_first_token_gets_comments_and_then_its_events() -> None:
    response = slow("the", delay_s=0.18).complete(stream=True)
    assert response.status_code == 200
    assert response.headers["content-type"].startswith("text/event-stream")
    assert response.headers["cache-control"] == "no-store"
    assert "content-length" not in response.headers
    before, _, rest = response.text.partition("data: ")
    assert before.count(COMMENT) >= 2
    assert before.replace(COMMENT, "") == ""
    assert rest.rstrip().endswith("data: [DONE]")


def test_comments_come_between_slow_tokens_too() -> None:
    text = slow("the cat", delay_s=0.12).complete(stream=True).text
    first_chunk, _, rest = text.partition("\n\ndata: ")[2].partition("\n\n")
    assert first_chunk.startswith("{")
    assert COMMENT in rest


def test_a_lively_stream_has_no_comment_and_nor_has_one_whose_option_is_off() -> None:
    assert COMMENT not in slow("the cat sat on the mat", delay_s=0.002).complete(stream=True).text
    assert COMMENT not in answering("the", delay_s=0.1).complete(stream=True).text


def test_a_whole_answer_has_no_comments() -> None:
    assert slow("the", delay_s=0.12).complete().json()["choices"]


@pytest.mark.parametrize(
    ("reject", "status"),
    [(WorkerOverloadedError(2.0), 429), (RequestRejectedError("never"), 400), (WorkerFailedError("gone"), 500)],
)
def test_what_is_known_when_a_worker_is_asked_is_a_status_however_long_that_takes(
    reject: Exception, status: int
) -> None:
    api = slow()
    generate = api.worker.generate

    async def after_a_while(request: Any) -> Any:
        await asyncio.sleep(4 * KEEP_ALIVE_S)
        api.worker.reject = reject
        async for frames in generate(request):
            yield frames

    api.worker.generate = after_a_while  # type: ignore[method-assign]
    assert api.complete(stream=True).status_code == status


def test_a_failure_soon_after_acceptance_is_a_status() -> None:
    assert slow(error=WorkerFailedError("died"), fail_after=0).complete(stream=True).status_code == 500


def test_a_failure_after_the_first_comment_is_an_event() -> None:
    api = slow(is_endless=True, delay_s=10)
    response = api.complete(stream=True, timeout=3.5 * KEEP_ALIVE_S)
    assert response.status_code == 200
    before, _, rest = response.text.partition("data: ")
    assert before.count(COMMENT) >= 2
    assert '"code":"timeout"' in rest
    assert "[DONE]" not in rest
    assert api.metrics.rejections == ["deadline"]


def test_a_client_that_leaves_while_it_waits_ends_the_workers_work() -> None:
    api = slow(is_endless=True, delay_s=30)
    pieces = asyncio.run(ask_and_leave(api, "/v1/completions", completion_body("true"), leave_after_events=2))
    assert pieces == [KEEP_ALIVE, KEEP_ALIVE]
    assert api.worker.num_open == 0
    assert api.worker.aborted == [api.worker.requests[0].request_id]
    assert [reason for reason, _ in api.metrics.finished] == ["abort"]


def test_chat_streams_are_kept_alive_as_well() -> None:
    assert slow("the", delay_s=0.12).chat(stream=True).text.startswith(COMMENT)
    assert MODEL in slow("the").chat(stream=True).text
