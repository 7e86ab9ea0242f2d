"""Anthropic's `/v1/messages`: shapes, streams, errors, and the official client over them."""

import asyncio
import json
from collections.abc import Callable, Coroutine
from typing import Any

import anthropic
import httpx
import httpx2
import pytest

from deployments.keys import KeyRing
from deployments.worker_client import WorkerUnavailableError
from tests.api_client import BASE_URL, MODEL, Api, answering

TEXT = "the dog 😀 สวัสดี"
MESSAGES = [{"role": "user", "content": "hello"}]


def ask(api: Api, **fields: Any) -> httpx.Response:
    return api.post("/v1/messages", json={"model": MODEL, "max_tokens": 50, "messages": MESSAGES, **fields})


def events_of(response: httpx.Response) -> list[dict[str, Any]]:
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    events = []
    for block in response.text.split("\n\n")[:-1]:
        name, data = block.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        events.append(event)
    return events


def test_a_message_has_anthropics_shape() -> None:
    answer = ask(answering(TEXT, num_cached_tokens=3)).json()
    assert answer.pop("id").startswith("msg_")
    num_input = answer["usage"]["input_tokens"]
    assert answer == {
        "type": "message",
        "role": "assistant",
        "model": MODEL,
        "content": [{"type": "text", "text": TEXT, "citations": None}],
        "stop_reason": "end_turn",
        "stop_sequence": None,
        "usage": {
            "input_tokens": num_input,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": 3,
            "output_tokens": answer["usage"]["output_tokens"],
        },
    }
    counted = answering(TEXT).post("/v1/messages/count_tokens", json={"model": MODEL, "messages": MESSAGES})
    assert counted.json() == {"input_tokens": num_input + 3}


@pytest.mark.parametrize(
    ("fields", "reason", "sequence", "text"),
    [
        ({"max_tokens": 2}, "max_tokens", None, None),
        ({"stop_sequences": ["never", "cat"]}, "stop_sequence", "cat", "the "),
        ({"stop_sequences": []}, "end_turn", None, "the cat sat"),
    ],
)
def test_it_says_why_it_ended(fields: dict[str, Any], reason: str, sequence: str | None, text: str | None) -> None:
    answer = ask(answering("the cat sat"), **fields).json()
    assert (answer["stop_reason"], answer["stop_sequence"]) == (reason, sequence)
    if text is not None:
        assert answer["content"][0]["text"] == text
    *_, delta, stop = events_of(ask(answering("the cat sat"), stream=True, **fields))
    assert delta["delta"] == {"stop_reason": reason, "stop_sequence": sequence}
    assert delta["usage"]["output_tokens"] == answer["usage"]["output_tokens"]
    assert stop == {"type": "message_stop"}


def test_a_stream_is_the_message_in_anthropics_order() -> None:
    events = events_of(ask(answering(TEXT, num_cached_tokens=3), stream=True))
    kinds = [event["type"] for event in events]
    deltas = kinds.count("content_block_delta")
    assert kinds == [
        "message_start",
        "ping",
        "content_block_start",
        *["content_block_delta"] * deltas,
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]
    start = events[0]["message"]
    assert (start["content"], start["stop_reason"], start["usage"]["output_tokens"]) == ([], None, 0)
    assert start["usage"]["cache_read_input_tokens"] == 3
    assert "".join(event["delta"]["text"] for event in events if event["type"] == "content_block_delta") == TEXT
    whole = ask(answering(TEXT, num_cached_tokens=3)).json()
    assert events[-2]["usage"] == whole["usage"]


def test_an_answer_without_text_has_no_block() -> None:
    assert ask(answering("")).json()["content"] == []
    kinds = [event["type"] for event in events_of(ask(answering(""), stream=True))]
    assert kinds == ["message_start", "ping", "message_delta", "message_stop"]


def test_system_and_blocks_are_the_chat_that_they_mean() -> None:
    api = answering("the", settings={"max_model_len": 256})
    blocks = [{"type": "text", "text": "he", "cache_control": {"type": "ephemeral"}}, {"type": "text", "text": "llo"}]
    ask(api, system=[{"type": "text", "text": "be "}, {"type": "text", "text": "kind"}],
        messages=[{"role": "user", "content": blocks}, {"role": "assistant", "content": "yes"}, *MESSAGES],
        top_k=0, metadata={"user_id": "u"}, thinking={"type": "disabled"})  # fmt: skip
    api.chat(
        messages=[
            {"role": "system", "content": "be kind"},
            {"role": "user", "content": "hello"},
            {"role": "assistant", "content": "yes"},
            {"role": "user", "content": "hello"},
        ]
    )
    asked, same = api.worker.requests
    assert asked.prompt_token_ids == same.prompt_token_ids
    assert (asked.params.max_tokens, asked.params.top_k) == (50, 0)
    counted = api.post("/v1/messages/count_tokens", json={"model": MODEL, "system": "be kind", "messages": MESSAGES})
    assert counted.json()["input_tokens"] > 0


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 10**9}, "context"),
        ({"messages": []}, "messages"),
        ({"messages": "hello"}, "messages"),
        ({"messages": [{"role": "system", "content": "a"}]}, "role"),
        ({"messages": [*MESSAGES, {"role": "assistant", "content": "a"}]}, "last one"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "type 'text'"),
        ({"system": 4}, "system"),
        ({"temperature": 3}, "temperature"),
        ({"top_p": -1}, "top_p"),
        ({"top_k": -1}, "top_k"),
        ({"stop_sequences": ["a"] * 100_000}, "stop_sequences"),
        ({"stop_sequences": [""]}, "stop_sequences"),
        ({"stop_sequences": "a"}, "stop_sequences"),
        ({"tools": [{"name": "f"}]}, "tools[0].input_schema"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0].type"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"tool_choice": {"type": "tool"}}, "tool_choice.name"),
        ({"messages": [{"role": "user", "content": [{"type": "tool_use", "id": "1", "name": "f", "input": {}}]}]},
         "messages[0].content[0]"),
        ({"messages": [{"role": "user", "content": [{"type": "tool_result"}]}]}, "messages[0].content[0].tool_use_id"),
        ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, "thinking"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_an_error_object_of_anthropics(fields: dict[str, Any], words: str) -> None:
    api = answering("the")
    for stream in (False, True):
        response = ask(api, stream=stream, **fields)
        assert response.status_code == 400
        body = response.json()
        assert body["type"] == "error"
        assert body["error"]["type"] == "invalid_request_error"
        assert words in body["error"]["message"]
        assert body["request_id"] == response.headers["x-request-id"]
    assert not api.worker.requests


def test_other_failures_have_that_shape_too() -> None:
    keys = KeyRing.parse('["a-key"]')
    cases = {
        "authentication_error": ask(answering("the", settings={"keys": keys})),
        "not_found_error": ask(answering("the"), model="other"),
        "request_too_large": ask(answering("the", settings={"max_body_bytes": 10})),
        "overloaded_error": ask(answering("the", reject=WorkerUnavailableError("none is up"))),
        "api_error": ask(answering("the", engine_error="no more", fail_after=0)),
        "invalid_request_error": answering("the").get("/v1/messages"),
    }
    assert [response.json()["error"]["type"] for response in cases.values()] == list(cases)
    assert {response.status_code for response in cases.values()} == {401, 404, 413, 503, 500, 405}


def test_a_failure_inside_a_stream_is_its_last_event() -> None:
    *_, last = events_of(ask(answering("the cat sat", engine_error="cannot grow", fail_after=3), stream=True))
    assert last["type"] == "error"
    assert last["error"] == {"type": "api_error", "message": "cannot grow"}


def with_client(api: Api, work: Callable[[anthropic.AsyncAnthropic], Coroutine[Any, Any, Any]], key: str = "k") -> Any:
    async def main() -> Any:
        client = anthropic.AsyncAnthropic(
            api_key=key,
            base_url=BASE_URL,
            http_client=httpx2.AsyncClient(transport=httpx2.ASGITransport(api.app)),
            max_retries=0,
            _strict_response_validation=True,
        )
        async with client:
            return await work(client)

    return asyncio.run(main())


def test_the_official_client_asks_and_counts() -> None:
    async def work(client: anthropic.AsyncAnthropic) -> tuple[Any, Any]:
        message = await client.messages.create(model=MODEL, max_tokens=50, messages=MESSAGES, system="be kind")
        count = await client.messages.count_tokens(model=MODEL, messages=MESSAGES, system="be kind")
        return message, count

    message, count = with_client(answering(TEXT, settings={"keys": KeyRing.parse('["k"]'), "max_model_len": 256}), work)
    assert message.content[0].text == TEXT
    assert message.usage.input_tokens == count.input_tokens


def test_the_official_client_streams() -> None:
    async def work(client: anthropic.AsyncAnthropic) -> tuple[str, Any]:
        async with client.messages.stream(model=MODEL, max_tokens=50, messages=MESSAGES) as stream:
            text = "".join([piece async for piece in stream.text_stream])
            return text, await stream.get_final_message()

    text, message = with_client(answering(TEXT), work)
    assert text == message.content[0].text == TEXT
    assert message.stop_reason == "end_turn"


def test_the_official_client_reads_our_errors() -> None:
    async def work(client: anthropic.AsyncAnthropic) -> None:
        await client.messages.create(model=MODEL, max_tokens=50, messages=MESSAGES)

    with pytest.raises(anthropic.AuthenticationError):
        with_client(answering("the", settings={"keys": KeyRing.parse('["k"]')}), work, key="other")

    async def stream(client: anthropic.AsyncAnthropic) -> None:
        async for _ in await client.messages.create(model=MODEL, max_tokens=50, messages=MESSAGES, stream=True):
            pass

    with pytest.raises(anthropic.APIStatusError, match="cannot grow"):
        with_client(answering("the cat sat", engine_error="cannot grow", fail_after=3), stream)


def test_a_request_has_a_time_and_an_error_its_field() -> None:
    late = ask(answering("one two", delay_s=30.0), timeout=0.1)
    assert (late.status_code, late.json()["error"]["type"]) == (504, "timeout_error")
    wrong = ask(answering("x"), timeout=0)
    assert (wrong.status_code, wrong.json()["error"]["message"][:9]) == (400, "timeout: ")
    too_long = ask(answering("x"), max_tokens=100_000)
    assert too_long.json()["error"]["message"].startswith("max_tokens: the model's context is")
