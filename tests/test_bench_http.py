"""The benchmark against a server on loopback: what it sends, what it makes of broken streams, what it leaves behind."""

import asyncio
import contextlib
import json
import socket
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
from aiohttp import web

from deployments.bench.driver import Run, drive
from deployments.bench.http_target import Dialect, HttpTarget, agree_on_prompts
from deployments.bench.prompts import PromptMaker
from deployments.bench.requests import PlannedRequest
from deployments.bench.slo import Slo
from deployments.bench.summary import summarize
from deployments.bench.target import TargetError
from tests.fake_completions_server import FakeServer, serving

PLAN = [PlannedRequest(n, 0.02 * n, 12, 5) for n in range(6)]


def target_at(url: str, *, model: str | None = None, text: bool = False) -> HttpTarget:
    return HttpTarget(url, PromptMaker(1000, 0, 512), model=model, text=text, api_key="key")


def with_target(
    server: FakeServer, use: Callable[[HttpTarget], Coroutine[Any, Any, Any]], *, text: bool = False
) -> Any:
    async def body() -> Any:
        async with serving(server) as url:
            target = target_at(url, text=text)
            try:
                await target.open()
                return await use(target)
            finally:
                await target.close()

    return asyncio.run(asyncio.wait_for(body(), 60.0))


def driven(server: FakeServer, timeout_s: float = 30.0, *, text: bool = False) -> Run:
    return with_target(server, lambda target: drive(target, PLAN, run_number=1, timeout_s=timeout_s), text=text)


def test_streams_are_timed_token_by_token_and_counted_by_usage() -> None:
    server = FakeServer(gap_s=0.01)
    run = driven(server)
    for answer in run.answers:
        assert answer.error is None
        assert len(answer.delivery_times_s) == answer.num_output_tokens == 5
        assert answer.num_input_tokens == 12
        assert answer.ttft_s is not None
        assert answer.ttft_s >= 0.01
        assert answer.e2e_s is not None
        assert answer.e2e_s >= 0.05


def test_each_request_carries_its_prompt_its_length_and_greedy_sampling() -> None:
    server = FakeServer()
    driven(server)
    bodies = server.bodies[1:]
    assert len(bodies) == len(PLAN)
    for body in bodies:
        assert (body["model"], body["max_tokens"], body["temperature"], body["stream"]) == ("fake", 5, 0.0, True)
        assert body["ignore_eos"] is True
        assert len(body["prompt"]) == 12
    assert len({tuple(body["prompt"]) for body in bodies}) == len(PLAN)


def test_text_prompts_are_words() -> None:
    server = FakeServer()
    driven(server, text=True)
    assert all(len(body["prompt"].split()) == 12 for body in server.bodies[1:])


@pytest.mark.parametrize(
    ("server", "dialect"),
    [
        (FakeServer(), Dialect(True, True, True)),
        (FakeServer(unknown_fields=frozenset({"ignore_eos"})), Dialect(True, False, True)),
        (FakeServer(unknown_fields=frozenset({"stream_options"})), Dialect(True, True, False)),
        (FakeServer(unknown_fields=frozenset({"stream_options", "ignore_eos"})), Dialect(True, False, False)),
        (FakeServer(takes_token_ids=False), Dialect(False, True, True)),
        (
            FakeServer(takes_token_ids=False, unknown_fields=frozenset({"stream_options", "ignore_eos"})),
            Dialect(False, False, False),
        ),
    ],
)
def test_what_a_strict_server_refuses_is_left_out(server: FakeServer, dialect: Dialect) -> None:
    async def use(target: HttpTarget) -> Dialect:
        return target.dialect

    assert with_target(server, use) == dialect


def test_without_usage_deliveries_are_counted() -> None:
    run = driven(FakeServer(unknown_fields=frozenset({"stream_options"})))
    assert [answer.num_output_tokens for answer in run.answers] == [5] * len(PLAN)


def test_a_token_that_was_delivered_with_another_counts_where_the_answer_reached_its_length() -> None:
    class Joining(FakeServer):
        async def _stream(self, response: web.StreamResponse, body: dict[str, Any]) -> None:
            await super()._stream(response, body | {"max_tokens": body["max_tokens"] - 1})

    server = Joining(unknown_fields=frozenset({"stream_options"}))
    run = driven(server)
    assert {len(answer.delivery_times_s) for answer in run.answers} == {4}
    assert {answer.num_output_tokens for answer in run.answers} == {5}
    stopping = driven(FakeServer(unknown_fields=frozenset({"stream_options"}), stop_after=3))
    assert {answer.num_output_tokens for answer in stopping.answers} == {3}


def test_a_server_whose_streams_end_with_their_finish_reason_is_taken_as_it_is() -> None:
    run = driven(FakeServer(says_done=False))
    assert [answer.error for answer in run.answers] == [None] * len(PLAN)
    broken = probe_then(FakeServer(says_done=False), break_after=3)
    assert [answer.error for answer in broken.answers] == ["the stream ended without [DONE]"] * len(PLAN)
    with pytest.raises(TargetError, match=r"without \[DONE\]"):
        driven(FakeServer(says_done=False, break_after=1))


def test_fields_of_one_server_go_into_its_requests_the_probe_too() -> None:
    server = FakeServer()

    async def body() -> None:
        async with serving(server) as url:
            prompts = PromptMaker(1000, 0, 512)
            more = {"repeat_penalty": 1.0, "temperature": 0.5}
            target = HttpTarget(url, prompts, model=None, text=False, api_key=None, name="ours", more_fields=more)
            try:
                await target.open()
                assert target.name == "ours"
                await drive(target, PLAN[:1], run_number=1, timeout_s=30.0)
            finally:
                await target.close()

    asyncio.run(body())
    assert [(seen["repeat_penalty"], seen["temperature"]) for seen in server.bodies] == [(1.0, 0.5)] * 2


def test_all_get_words_where_one_takes_no_token_ids() -> None:
    servers = [FakeServer(), FakeServer(takes_token_ids=False), FakeServer()]

    async def body() -> list[str]:
        async with contextlib.AsyncExitStack() as stack:
            targets = [target_at(await stack.enter_async_context(serving(server))) for server in servers]
            for target, name in zip(targets, "abc", strict=True):
                target.name = name
                stack.push_async_callback(target.close)
                await target.open()
            refusing = agree_on_prompts(targets)
            for target in targets:
                await drive(target, PLAN[:1], run_number=1, timeout_s=30.0)
            return refusing

    assert asyncio.run(body()) == ["b"]
    prompts = [server.bodies[-1]["prompt"] for server in servers]
    assert prompts[0] == prompts[1] == prompts[2]
    assert len(prompts[0].split()) == 12


def probe_then(server: FakeServer, **changes: Any) -> Run:
    """Drives a server that changes after the probe."""

    async def use(target: HttpTarget) -> Run:
        for name, value in changes.items():
            setattr(server, name, value)
        return await drive(target, PLAN, run_number=1, timeout_s=30.0)

    return with_target(server, use)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"break_after": 3}, r"without \[DONE\]"),
        ({"error_after": 3}, "the worker died"),
        ({"status": 503}, "HTTP 503: out of order"),
        ({"status": 429}, "HTTP 429"),
    ],
)
def test_a_stream_that_breaks_is_a_failed_request_with_its_reason(changes: dict[str, Any], message: str) -> None:
    run = probe_then(FakeServer(), **changes)
    for answer in run.answers:
        assert answer.error is not None
        with pytest.raises(TargetError, match=message):
            raise TargetError(answer.error)
        assert not answer.is_complete


@pytest.mark.parametrize(
    ("usage", "named"),
    [
        ({"prompt_tokens": 12, "completion_tokens": -7}, "completion_tokens -7"),
        ({"prompt_tokens": 12, "completion_tokens": 0}, "completion_tokens 0"),
        ({"prompt_tokens": 12, "completion_tokens": 10**9}, "completion_tokens 1000000000"),
        ({"prompt_tokens": 12, "completion_tokens": True}, "completion_tokens True"),
        ({"prompt_tokens": 12, "completion_tokens": "5"}, "completion_tokens '5'"),
        ({"prompt_tokens": -1, "completion_tokens": 5}, "prompt_tokens -1"),
        ({"prompt_tokens": 10**9, "completion_tokens": 5}, "prompt_tokens 1000000000"),
        ({"completion_tokens": 5}, "prompt_tokens None"),
        (["none"], "prompt_tokens None"),
    ],
)
def test_usage_that_cannot_be_true_is_a_failed_request_by_name(usage: Any, named: str) -> None:
    run = probe_then(FakeServer(), usage=usage)
    assert [answer.error for answer in run.answers] == [f"usage cannot be true: {named}"] * len(PLAN)
    assert summarize(run, Slo()).output_tokens_per_s == 0.0


def test_an_answer_longer_than_asked_for_is_believed_where_its_text_is_as_long() -> None:
    class Longer(FakeServer):
        async def _stream(self, response: web.StreamResponse, body: dict[str, Any]) -> None:
            await super()._stream(response, body | {"max_tokens": body["max_tokens"] + 2})

    assert {answer.num_output_tokens for answer in driven(Longer()).answers} == {7}


@pytest.mark.parametrize("choices", [{"text": "x"}, ["x"], 3])
def test_choices_of_a_wrong_form_are_a_failed_request(choices: Any) -> None:
    class Odd(FakeServer):
        async def _stream(self, response: web.StreamResponse, body: dict[str, Any]) -> None:
            if len(self.bodies) > 1:
                await response.write(f"data: {json.dumps({'choices': choices})}\n\n".encode())
            await super()._stream(response, body)

    errors = {answer.error for answer in driven(Odd()).answers}
    assert errors == {"the choices of an event are no list of objects"}


def test_a_timeout_closes_the_stream_at_the_server() -> None:
    server = FakeServer()

    async def use(target: HttpTarget) -> Run:
        server.gap_s = 5.0
        run = await drive(target, PLAN[:2], run_number=1, timeout_s=0.3)
        for _ in range(100):
            if server.num_cancelled == 2:
                break
            await asyncio.sleep(0.02)
        return run

    run = with_target(server, use)
    assert [answer.error for answer in run.answers] == ["no end within 0.3 s"] * 2
    assert server.num_cancelled == 2


@pytest.mark.parametrize(
    ("server", "message"),
    [(FakeServer(models=[]), "lists no model"), (FakeServer(status=500), "HTTP 500")],
)
def test_a_server_that_cannot_be_used_is_refused_before_the_run(server: FakeServer, message: str) -> None:
    with pytest.raises(TargetError, match=message):
        driven(server)


def test_nobody_listening_is_said_in_words() -> None:
    async def body() -> None:
        with socket.socket() as unused:
            unused.bind(("127.0.0.1", 0))
            target = target_at(f"http://127.0.0.1:{unused.getsockname()[1]}")
            try:
                await target.open()
            finally:
                await target.close()

    with pytest.raises(TargetError, match="Connect"):
        asyncio.run(body())
