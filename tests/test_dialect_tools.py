"""Tools in Anthropic's messages and OpenAI's responses: the chats that they mean, their answers whole and streamed,
forms of the text, and the official clients over them.
"""

import dataclasses
import json
from typing import Any

import anthropic
import httpx
import openai
import pytest
from pydantic import BaseModel

from deployments.dialects.messages_body import CountTokensRequest, MessagesRequest
from deployments.dialects.responses_body import ResponsesRequest
from tests.api_client import MODEL, Api, answering
from tests.test_api_openai_client import ask as with_openai
from tests.test_dialect_messages import events_of as message_events_of
from tests.test_dialect_messages import with_client as with_anthropic
from tests.test_dialect_responses import events_of as response_events_of

SCHEMA = {"type": "object", "properties": {"zone": {"type": "string"}}, "required": ["zone"]}
ARGUMENTS = '{"zone": "Paris"}'
CALL = f'<tool_call>\n{{"name": "clock", "arguments": {ARGUMENTS}}}\n</tool_call>'
#: of the chat API
TOOLS = [{"type": "function", "function": {"name": "clock", "description": "the time", "parameters": SCHEMA}}]
MESSAGE_TOOLS: list[Any] = [{"name": "clock", "description": "the time", "input_schema": SCHEMA}]
RESPONSE_TOOLS: list[Any] = [{"type": "function", "name": "clock", "description": "the time", "parameters": SCHEMA}]
ASKED = [{"role": "user", "content": "when?"}]


def calling(text: str = CALL, **settings: Any) -> Api:
    return answering(text, settings={"max_model_len": 4096, **settings})


def ask_message(api: Api, **fields: Any) -> httpx.Response:
    return api.post("/v1/messages", json={"model": MODEL, "max_tokens": 200, "messages": ASKED, **fields})


def ask_response(api: Api, **fields: Any) -> httpx.Response:
    return api.post("/v1/responses", json={"model": MODEL, "input": "when?", **fields})


def test_a_call_is_a_block_of_a_message() -> None:
    answer = ask_message(calling("I look.\n" + CALL), tools=MESSAGE_TOOLS).json()
    text, call = answer["content"]
    assert text["text"] == "I look."
    assert call.pop("id").startswith("toolu_")
    assert call == {"type": "tool_use", "name": "clock", "input": {"zone": "Paris"}}
    assert answer["stop_reason"] == "tool_use"


def test_a_streamed_call_is_the_blocks_of_the_whole_message() -> None:
    events = message_events_of(ask_message(calling("I look.\n" + CALL * 2), tools=MESSAGE_TOOLS, stream=True))
    starts = [event for event in events if event["type"] == "content_block_start"]
    assert [start["index"] for start in starts] == [0, 1, 2]
    assert [start["content_block"]["type"] for start in starts] == ["text", "tool_use", "tool_use"]
    assert starts[1]["content_block"]["input"] == {}
    open_block: int | None = None
    written = ["", "", ""]
    for event in events:
        if event["type"] == "content_block_start":
            assert open_block is None
            open_block = event["index"]
        elif event["type"] == "content_block_delta":
            assert event["index"] == open_block
            written[event["index"]] += event["delta"].get("text", "") + event["delta"].get("partial_json", "")
        elif event["type"] == "content_block_stop":
            assert event["index"] == open_block
            open_block = None
    assert open_block is None
    assert written == ["I look.", ARGUMENTS, ARGUMENTS]
    assert len([event for event in events if event.get("delta", {}).get("type") == "input_json_delta"]) > 4
    assert events[-2]["delta"]["stop_reason"] == "tool_use"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (CALL[: CALL.index("Pa") + 2], {"zone": "Pa"}),
        ('<tool_call>{"name": "clock", "arguments": [1]}</tool_call>', {}),
        ('<tool_call>{"name": "clock", "arguments": {"a": NaN}}</tool_call>', {}),
        ('<tool_call>{"name": "clock", "arguments": {"a": 1e999}}</tool_call>', {}),
        ('<tool_call>{"name": "clock", "arguments": {"a": "\\ud83d"}}</tool_call>', {}),
        ('<tool_call>{"name": "clock"}</tool_call>', {}),
    ],
)
def test_arguments_that_are_no_whole_object_never_fail_a_message(text: str, expected: dict[str, Any]) -> None:
    (call,) = ask_message(calling(text), tools=MESSAGE_TOOLS).json()["content"]
    assert call["input"] == expected


def test_reasoning_is_a_block_or_an_item_of_its_own() -> None:
    text = "<think>\nhm\n</think>\n\nnoon"
    thought, said = ask_message(calling(text, reasoning_parser="think")).json()["content"]
    assert thought == {"type": "thinking", "thinking": "hm", "signature": ""}
    assert said["text"] == "noon"
    answer = ask_response(calling(text, reasoning_parser="think")).json()
    assert [item["type"] for item in answer["output"]] == ["reasoning", "message"]
    assert answer["output"][0]["content"] == [{"type": "reasoning_text", "text": "hm"}]
    events = response_events_of(ask_response(calling(text, reasoning_parser="think"), stream=True))
    assert "".join(event["delta"] for event in events if event["type"] == "response.reasoning_text.delta") == "hm"


def test_blocks_of_calls_and_results_are_the_chat_that_they_mean() -> None:
    api = calling("noon")
    messages = [
        *ASKED,
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "hm", "signature": ""},
                {"type": "text", "text": "I look."},
                {"type": "tool_use", "id": "1", "name": "clock", "input": {"zone": "Paris"}},
                {"type": "tool_use", "id": "2", "name": "clock", "input": {}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "1", "content": [{"type": "text", "text": "12:00"}]},
                {"type": "tool_result", "tool_use_id": "2", "content": "no zone", "is_error": True},
                {"type": "text", "text": "So?"},
            ],
        },
    ]
    ask_message(api, messages=messages, tools=MESSAGE_TOOLS)
    call = {"type": "function", "function": {"name": "clock", "arguments": ARGUMENTS}}
    other = {"type": "function", "function": {"name": "clock", "arguments": "{}"}}
    api.chat(
        messages=[
            *ASKED,
            {"role": "assistant", "content": "I look.", "tool_calls": [{"id": "1", **call}, {"id": "2", **other}]},
            {"role": "tool", "tool_call_id": "1", "content": "12:00"},
            {"role": "tool", "tool_call_id": "2", "content": "Error: no zone"},
            {"role": "user", "content": "So?"},
        ],
        tools=TOOLS,
    )
    asked, same = api.worker.requests
    assert asked.prompt_token_ids == same.prompt_token_ids
    counted = api.post(
        "/v1/messages/count_tokens", json={"model": MODEL, "messages": messages, "tools": MESSAGE_TOOLS}
    )
    assert counted.json() == {"input_tokens": len(asked.prompt_token_ids)}


def test_items_of_calls_and_results_are_the_chat_that_they_mean() -> None:
    api = calling("noon")
    items = [
        {"role": "user", "content": "when?"},
        {"type": "reasoning", "id": "rs_1", "summary": []},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "I look."}]},
        {"type": "function_call", "call_id": "1", "name": "clock", "arguments": ARGUMENTS, "id": "fc_1"},
        {"type": "function_call", "call_id": "2", "name": "clock", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "1", "output": "12:00"},
        {"type": "function_call_output", "call_id": "2", "output": [{"type": "input_text", "text": "none"}]},
    ]
    ask_response(api, input=items, tools=RESPONSE_TOOLS)
    calls = [
        {"id": str(number), "type": "function", "function": {"name": "clock", "arguments": arguments}}
        for number, arguments in ((1, ARGUMENTS), (2, "{}"))
    ]
    api.chat(
        messages=[
            *ASKED,
            {"role": "assistant", "content": "I look.", "tool_calls": calls},
            {"role": "tool", "tool_call_id": "1", "content": "12:00"},
            {"role": "tool", "tool_call_id": "2", "content": "none"},
        ],
        tools=TOOLS,
    )
    asked, same = api.worker.requests
    assert asked.prompt_token_ids == same.prompt_token_ids


@pytest.mark.parametrize(
    ("of_messages", "of_responses", "of_chats"),
    [
        ({"type": "auto"}, "auto", "auto"),
        ({"type": "none"}, "none", "none"),
        ({"type": "any"}, "required", "required"),
        ({"type": "tool", "name": "clock"}, {"type": "function", "name": "clock"},
         {"type": "function", "function": {"name": "clock"}}),
    ],
)  # fmt: skip
@pytest.mark.parametrize("is_parallel", [True, False])
def test_a_choice_is_the_chats(of_messages: Any, of_responses: Any, of_chats: Any, is_parallel: bool) -> None:
    api = calling()
    if of_messages["type"] != "none":
        of_messages = {**of_messages, "disable_parallel_tool_use": not is_parallel}
    ask_message(api, tools=MESSAGE_TOOLS, tool_choice=of_messages)
    ask_response(api, tools=RESPONSE_TOOLS, tool_choice=of_responses, parallel_tool_calls=is_parallel)
    api.chat(messages=ASKED, tools=TOOLS, tool_choice=of_chats, parallel_tool_calls=is_parallel)
    grammars = [request.params.grammar for request in api.worker.requests]
    assert grammars[0] == grammars[1] == grammars[2]
    assert (grammars[0] is None) is (of_chats in ("auto", "none"))
    prompts = [request.prompt_token_ids for request in api.worker.requests]
    assert prompts[0] == prompts[1] == prompts[2]


def test_a_call_is_an_item_of_a_response() -> None:
    answer = ask_response(calling("I look.\n" + CALL), tools=RESPONSE_TOOLS, tool_choice="auto").json()
    said, call = answer["output"]
    assert said["content"][0]["text"] == "I look."
    assert (call["type"], call["name"], call["arguments"]) == ("function_call", "clock", ARGUMENTS)
    assert (call["status"], answer["status"]) == ("completed", "completed")
    assert call["id"].startswith("fc_")
    assert call["call_id"].startswith("call_")
    assert (answer["tools"][0]["name"], answer["tool_choice"]) == ("clock", "auto")


def test_a_streamed_call_is_an_item_between_its_events() -> None:
    events = response_events_of(ask_response(calling(), tools=RESPONSE_TOOLS, stream=True))
    kinds = [event["type"].removeprefix("response.") for event in events]
    num_deltas = kinds.count("function_call_arguments.delta")
    assert num_deltas > 2
    assert kinds == [
        "created",
        "in_progress",
        "output_item.added",
        *["function_call_arguments.delta"] * num_deltas,
        "function_call_arguments.done",
        "output_item.done",
        "completed",
    ]
    assert "".join(event["delta"] for event in events if "delta" in event) == events[-3]["arguments"] == ARGUMENTS
    assert events[2]["item"] == {**events[-2]["item"], "arguments": "", "status": "in_progress"}
    assert events[-1]["response"]["output"] == [events[-2]["item"]]


def test_log_probabilities_of_a_text_beside_a_call_are_the_streams() -> None:
    asked: dict[str, Any] = {"tools": RESPONSE_TOOLS, "include": ["message.output_text.logprobs"]}
    whole = ask_response(calling("I look.\n" + CALL), **asked).json()["output"][0]["content"][0]
    events = response_events_of(ask_response(calling("I look.\n" + CALL), stream=True, **asked))
    assert events[-1]["response"]["output"][0]["content"][0] == whole
    told = [entry for event in events if event["type"].endswith("text.delta") for entry in event["logprobs"]]
    assert told == whole["logprobs"]
    assert "".join(entry["token"] for entry in told).strip() == "I look."


OPTIONAL: list[tuple[str, type[BaseModel], dict[str, Any]]] = [
    ("/v1/messages", MessagesRequest, {"max_tokens": 20, "messages": ASKED}),
    ("/v1/messages/count_tokens", CountTokensRequest, {"messages": ASKED}),
    ("/v1/responses", ResponsesRequest, {"input": "when?"}),
]


@pytest.mark.parametrize(("path", "kind", "required"), OPTIONAL)
def test_null_means_the_default_of_every_optional_field(
    path: str, kind: type[BaseModel], required: dict[str, Any]
) -> None:
    nulls = {name: None for name, field in kind.model_fields.items() if not field.is_required()}
    assert len(nulls) > 4
    api = calling("noon")
    for fields in ({}, nulls):
        assert api.post(path, json={"model": MODEL, **required, **fields}).status_code == 200
    if api.worker.requests:
        first, second = api.worker.requests
        assert first.prompt_token_ids == second.prompt_token_ids
        assert dataclasses.replace(first.params, seed=0) == dataclasses.replace(second.params, seed=0)


def test_a_call_that_was_cut_is_incomplete() -> None:
    (item,) = ask_response(calling(), tools=RESPONSE_TOOLS, max_output_tokens=60).json()["output"]
    assert item["status"] == "incomplete"
    assert item["arguments"].startswith('{"')
    cut = ask_message(calling(), tools=MESSAGE_TOOLS, max_tokens=60).json()
    assert (cut["stop_reason"], cut["content"][0]["type"]) == ("max_tokens", "tool_use")


FORMS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"type": "json_object"}, {"type": "json_object"}),
    (
        {"type": "json_schema", "name": "time", "schema": SCHEMA, "strict": True},
        {"type": "json_schema", "json_schema": {"name": "time", "schema": SCHEMA}},
    ),
]


@pytest.mark.parametrize(("of_responses", "of_chats"), FORMS)
def test_a_form_of_the_text_is_the_chats(of_responses: dict[str, Any], of_chats: dict[str, Any]) -> None:
    api = calling(ARGUMENTS)
    answer = ask_response(api, text={"format": of_responses}).json()
    api.chat(response_format=of_chats)
    asked, same = api.worker.requests
    assert asked.params.grammar == same.params.grammar is not None
    assert answer["text"]["format"].items() >= of_responses.items()


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"text": {"format": {"type": "json_schema", "name": "a"}}}, "text.format.schema"),
        ({"text": {"format": {"type": "json_schema", "schema": SCHEMA}}}, "text.format.name"),
        ({"text": {"format": {"type": "json_schema", "name": "a", "schema": {"type": "dragon"}}}},
         "text.format.schema"),
        ({"text": {"format": FORMS[1][0]}, "tools": RESPONSE_TOOLS, "tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "name": "other"}, "tools": RESPONSE_TOOLS}, "tool_choice"),
        ({"tool_choice": {"type": "allowed_tools"}, "tools": RESPONSE_TOOLS}, "tool_choice"),
        ({"tool_choice": "sometimes"}, "tool_choice"),
        ({"tools": [{"type": "function"}]}, "tools[0].name"),
        ({"tools": RESPONSE_TOOLS * 2}, "tools"),
        ({"input": [{"type": "function_call", "name": "clock", "arguments": "{}"}]}, "input[0].call_id"),
        ({"input": [{"type": "function_call_output", "call_id": "1", "output": 5}]}, "input[0].output"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused_by_the_name_that_the_client_knows(fields: dict[str, Any], param: str) -> None:
    api = calling()
    response = ask_response(api, **fields)
    assert (response.status_code, response.json()["error"]["param"]) == (400, param)
    assert not api.worker.requests


def test_anthropics_client_calls_tools_whole_and_streamed() -> None:
    async def work(client: anthropic.AsyncAnthropic) -> tuple[Any, Any]:
        asked: dict[str, Any] = {"model": MODEL, "max_tokens": 200, "messages": ASKED, "tools": MESSAGE_TOOLS}
        message = await client.messages.create(**asked, tool_choice={"type": "any"})
        async with client.messages.stream(**asked) as stream:
            return message, await stream.get_final_message()

    for message in with_anthropic(calling(), work):
        (call,) = message.content
        assert (call.type, call.name, call.input) == ("tool_use", "clock", {"zone": "Paris"})
        assert message.stop_reason == "tool_use"


def test_openais_client_calls_tools_whole_and_streamed() -> None:
    async def work(client: openai.AsyncOpenAI) -> tuple[Any, Any]:
        asked: dict[str, Any] = {"model": MODEL, "input": "when?", "tools": RESPONSE_TOOLS}
        response = await client.responses.create(**asked, tool_choice="required")
        async with client.responses.stream(**asked) as stream:
            async for _ in stream:
                pass
            return response, await stream.get_final_response()

    for response in with_openai(calling("<think>hm</think>" + CALL, reasoning_parser="think"), work):
        call = response.output[-1]
        assert (call.type, call.name, json.loads(call.arguments)) == ("function_call", "clock", {"zone": "Paris"})


def test_how_much_to_reason_reaches_templates_that_know_it() -> None:
    template = "<|im_start|>{{ messages[0].content }} {{ reasoning_effort | default('any') }}<|im_end|>"
    api = Api(calling("noon").worker, settings={"max_model_len": 4096}, chat_template=template)
    api.chat(messages=ASKED, reasoning_effort="low")
    ask_response(api, reasoning={"effort": "low", "summary": "auto"})
    api.chat(messages=ASKED, reasoning_effort="low", chat_template_kwargs={"reasoning_effort": "high"})
    api.chat(messages=ASKED)
    prompts = [api.tokenizer.decode(request.prompt_token_ids) for request in api.worker.requests]
    assert prompts == ["when? low", "when? low", "when? high", "when? any"]
