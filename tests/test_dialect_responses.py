"""OpenAI's `/v1/responses`: shapes, streams, what is refused, and the official client in strict validation."""

import json
from typing import Any

import httpx
import openai
import pytest

from tests.api_client import MODEL, Api, answering
from tests.test_api_openai_client import ask as with_client

TEXT = "the dog 😀 สวัสดี"


def ask(api: Api, **fields: Any) -> httpx.Response:
    return api.post("/v1/responses", json={"model": MODEL, "input": "hello", **fields})


def events_of(response: httpx.Response) -> list[dict[str, Any]]:
    assert response.status_code == 200, response.text
    blocks = [block.split("\n") for block in response.text.split("\n\n")[:-1]]
    events = [json.loads(data.removeprefix("data: ")) for _, data in blocks]
    assert [name for name, _ in blocks] == [f"event: {event['type']}" for event in events]
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    return events


def test_a_response_holds_one_message() -> None:
    answer = ask(answering(TEXT, num_cached_tokens=2), instructions="be kind", metadata={"a": "b"}, store=True).json()
    assert answer["id"].startswith("resp_")
    assert (answer["object"], answer["status"], answer["model"]) == ("response", "completed", MODEL)
    (item,) = answer["output"]
    assert (item["type"], item["role"], item["status"]) == ("message", "assistant", "completed")
    assert item["content"] == [{"type": "output_text", "text": TEXT, "annotations": [], "logprobs": []}]
    assert answer["store"] is False
    assert (answer["instructions"], answer["metadata"]) == ("be kind", {"a": "b"})
    usage = answer["usage"]
    assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"]
    assert usage["input_tokens_details"]["cached_tokens"] == 2


def test_an_answer_that_was_cut_is_incomplete() -> None:
    answer = ask(answering("the cat sat"), max_output_tokens=2).json()
    assert answer["status"] == answer["output"][0]["status"] == "incomplete"
    assert answer["incomplete_details"] == {"reason": "max_output_tokens"}
    last = events_of(ask(answering("the cat sat"), max_output_tokens=2, stream=True))[-1]
    assert last["type"] == "response.incomplete"
    assert last["response"]["status"] == "incomplete"


def test_a_stream_tells_its_items_in_order() -> None:
    events = events_of(ask(answering(TEXT), stream=True))
    kinds = [event["type"] for event in events]
    num_deltas = kinds.count("response.output_text.delta")
    assert kinds == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        *["response.output_text.delta"] * num_deltas,
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    ]
    assert "".join(event["delta"] for event in events if event["type"].endswith("text.delta")) == TEXT
    assert events[-4]["text"] == events[-3]["part"]["text"] == TEXT
    assert events[0]["response"]["usage"] is None
    whole = ask(answering(TEXT)).json()
    assert whole["output"][0]["content"] == events[-1]["response"]["output"][0]["content"]
    assert whole["usage"] == events[-1]["response"]["usage"]
    assert len({event["item_id"] for event in events if "item_id" in event}) == 1


def test_a_failure_inside_a_stream_is_a_failed_response() -> None:
    last = events_of(ask(answering("the cat sat", engine_error="cannot grow", fail_after=3), stream=True))[-1]
    assert last["type"] == "response.failed"
    assert last["response"]["status"] == "failed"
    assert last["response"]["error"] == {"code": "server_error", "message": "cannot grow"}
    assert "the" in last["response"]["output"][0]["content"][0]["text"]


def test_items_are_the_chat_that_they_mean() -> None:
    api = answering("the")
    parts = [{"type": "input_text", "text": "he"}, {"type": "input_text", "text": "llo"}]
    earlier = {
        "type": "message",
        "id": "msg_1",
        "status": "completed",
        "role": "assistant",
        "content": [{"type": "output_text", "text": "yes", "annotations": []}],
    }
    items = [
        {"role": "developer", "content": "be brief"},
        {"role": "user", "content": parts},
        {"type": "reasoning", "id": "rs_1", "summary": []},
        earlier,
        {"type": "message", "role": "user", "content": "hello"},
    ]
    ask(api, input=items, instructions="be kind", tools=[], tool_choice="auto", truncation="disabled")
    api.chat(
        messages=[
            {"role": "system", "content": "be kind\n\nbe brief"},
            {"role": "user", "content": "hello"},
            {"role": "assistant", "content": "yes"},
            {"role": "user", "content": "hello"},
        ]
    )
    asked, same = api.worker.requests
    assert asked.prompt_token_ids == same.prompt_token_ids
    assert asked.request_id.startswith("resp_")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": []}, "input"),
        ({"input": 4}, "input"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input"),
        ({"input": [{"role": "tool", "content": "a"}]}, "input[0].role"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content"),
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"conversation": "c"}, "conversation"),
        ({"background": True}, "background"),
        ({"truncation": "auto"}, "truncation"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"text": {"format": {"type": "yaml"}}}, "text.format.type"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"max_output_tokens": 10**6}, "max_output_tokens"),
        ({"input": "hello " * 100}, "input"),
        ({"top_logprobs": 21, "include": ["message.output_text.logprobs"]}, "top_logprobs"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"include": ["everything"]}, "include"),
        ({"temperature": 2.1}, "temperature"),
        ({"metadata": {str(i): "" for i in range(17)}}, "metadata"),
        ({"model": None}, "model"),
    ],
)
def test_what_is_wrong_is_named(fields: dict[str, Any], param: str) -> None:
    api = answering("the")
    for stream in (False, True):
        response = ask(api, stream=stream, **fields)
        assert (response.status_code, response.json()["error"]["param"]) == (400, param)
    assert not api.worker.requests


def test_the_client_gets_a_response() -> None:
    response = with_client(
        answering(TEXT),
        lambda client: client.responses.create(
            model=MODEL, input="hello", include=["message.output_text.logprobs"], top_logprobs=2
        ),
    )
    assert response.output_text == TEXT
    assert len(response.output[0].content[0].logprobs) == response.usage.output_tokens


def test_the_client_streams_a_response() -> None:
    async def work(client: openai.AsyncOpenAI) -> tuple[list[Any], Any]:
        async with client.responses.stream(model=MODEL, input="hello") as stream:
            events = [event async for event in stream]
            return events, await stream.get_final_response()

    events, final = with_client(answering(TEXT), work)
    assert events[-1].type == "response.completed"
    assert final.output_text == TEXT


def test_the_client_streams_raw_events_with_logprobs() -> None:
    async def work(client: openai.AsyncOpenAI) -> list[Any]:
        stream = await client.responses.create(
            model=MODEL, input="hello", stream=True, include=["message.output_text.logprobs"], top_logprobs=1
        )
        return [event async for event in stream]

    events = with_client(answering(TEXT), work)
    logprobs = [entry for event in events if event.type == "response.output_text.delta" for entry in event.logprobs]
    assert len(logprobs) == events[-1].response.usage.output_tokens


def test_the_client_reads_our_errors() -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        with_client(
            answering("the"),
            lambda client: client.responses.create(model=MODEL, input="a", previous_response_id="resp_1"),
        )
    assert caught.value.param == "previous_response_id"
    assert "an earlier response is not supported; none is stored here" in caught.value.message


def test_a_request_has_a_time() -> None:
    late = ask(answering("one two", delay_s=30.0), timeout=0.1)
    assert (late.status_code, late.json()["error"]["code"]) == (504, "timeout")
    wrong = ask(answering("x"), timeout=0)
    assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "timeout")
