"""Tools, responses and messages against the running server, by the official clients in strict validation."""

import json
from collections.abc import Iterator
from typing import Any

import anthropic
import openai
import pytest

from tests.end_to_end.configuration import MODEL
from tests.server_process import ServerProcess

pytestmark = [pytest.mark.slow, pytest.mark.ray, pytest.mark.model]

QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
WEATHER = [{"role": "user", "content": "How is the weather in Paris?"}]
TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "The weather of a city",
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"type": "string", "maxLength": 20},
                    "unit": {"enum": ["celsius", "fahrenheit"]},
                },
                "required": ["city", "unit"],
                "additionalProperties": False,
            },
        },
    }
]
FORCED: list[Any] = ["required", {"type": "function", "function": {"name": "get_weather"}}]


@pytest.fixture
def client(server: ServerProcess) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(
        base_url=f"{server.url}/v1", api_key="none", max_retries=0, _strict_response_validation=True
    ) as strict_client:
        yield strict_client


@pytest.mark.parametrize("choice", FORCED, ids=["required", "named"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_forced_call_goes_out_and_its_result_comes_back(
    client: openai.OpenAI, choice: Any, temperature: float
) -> None:
    asked: dict[str, Any] = {
        "model": MODEL,
        "tools": TOOLS,
        "tool_choice": choice,
        "parallel_tool_calls": False,
        "temperature": temperature,
        "seed": 3,
        "max_tokens": 100,
    }
    chat = client.chat.completions.create(messages=WEATHER, **asked)
    message = chat.choices[0].message
    assert chat.choices[0].finish_reason == "tool_calls"
    (call,) = message.tool_calls
    arguments = json.loads(call.function.arguments)
    assert call.function.name == "get_weather"
    assert arguments.keys() == {"city", "unit"}
    assert arguments["unit"] in ("celsius", "fahrenheit")

    with client.chat.completions.create(messages=WEATHER, stream=True, **asked) as stream:
        deltas = [chunk.choices[0].delta for chunk in stream]
    written = [part.function.arguments for delta in deltas for part in delta.tool_calls or []]
    assert len(written) > 2
    assert json.loads("".join(written)) == arguments

    result = {"role": "tool", "tool_call_id": call.id, "content": "18 degrees and sunny"}
    answer = client.chat.completions.create(
        model=MODEL,
        messages=[*WEATHER, message.model_dump(exclude_none=True), result],
        tools=TOOLS,
        tool_choice="none",
        max_tokens=20,
        temperature=0,
    )
    assert answer.choices[0].message.content
    assert not answer.choices[0].message.tool_calls


def test_a_forced_call_of_a_message_goes_out_and_its_result_comes_back(server: ServerProcess) -> None:
    function = TOOLS[0]["function"]
    tools: list[Any] = [{"name": function["name"], "input_schema": function["parameters"]}]
    asked: dict[str, Any] = {"model": MODEL, "max_tokens": 100, "tools": tools, "extra_body": {"temperature": 0}}
    with anthropic.Anthropic(
        base_url=server.url, api_key="none", max_retries=0, _strict_response_validation=True
    ) as client:
        forced: dict[str, Any] = {"type": "any", "disable_parallel_tool_use": True}
        message = client.messages.create(messages=WEATHER, tool_choice=forced, **asked)
        (call,) = message.content
        assert (message.stop_reason, call.name, call.input.keys()) == ("tool_use", "get_weather", {"city", "unit"})
        with client.messages.stream(messages=WEATHER, tool_choice=forced, **asked) as stream:
            pieces = [event.partial_json for event in stream if event.type == "input_json"]
            (streamed,) = stream.get_final_message().content
        assert len(pieces) > 2
        assert json.loads("".join(pieces)) == streamed.input == call.input
        result = {"type": "tool_result", "tool_use_id": call.id, "content": "18 degrees and sunny"}
        answer = client.messages.create(
            messages=[
                *WEATHER,
                {"role": "assistant", "content": message.content},
                {"role": "user", "content": [result]},
            ],
            tool_choice={"type": "none"},
            **{**asked, "max_tokens": 20},
        )
    assert answer.content[0].text


def test_a_forced_call_of_a_response_goes_out_and_its_result_comes_back(client: openai.OpenAI) -> None:
    tools: list[Any] = [{"type": "function", "strict": True, **TOOLS[0]["function"]}]
    asked: dict[str, Any] = {"model": MODEL, "tools": tools, "temperature": 0, "max_output_tokens": 100}
    asked["parallel_tool_calls"] = False
    response = client.responses.create(input=WEATHER, tool_choice="required", **asked)
    (call,) = response.output
    arguments = json.loads(call.arguments)
    assert (call.type, call.name, arguments.keys()) == ("function_call", "get_weather", {"city", "unit"})
    with client.responses.stream(input=WEATHER, tool_choice="required", **asked) as stream:
        pieces = [event.delta for event in stream if event.type == "response.function_call_arguments.delta"]
    assert len(pieces) > 2
    assert json.loads("".join(pieces)) == arguments
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "18 degrees and sunny"}
    given: list[Any] = [*WEATHER, call.model_dump(exclude_none=True), result]
    asked["max_output_tokens"] = 20
    assert client.responses.create(input=given, tool_choice="none", **asked).output_text


def test_a_responses_text_follows_its_schema(client: openai.OpenAI) -> None:
    schema = TOOLS[0]["function"]["parameters"]
    form: Any = {"format": {"type": "json_schema", "name": "weather", "schema": schema, "strict": True}}
    response = client.responses.create(model=MODEL, input=WEATHER, text=form, temperature=1, max_output_tokens=100)
    assert json.loads(response.output_text).keys() == {"city", "unit"}


def test_a_response_is_the_chats_answer(client: openai.OpenAI) -> None:
    chat = client.chat.completions.create(model=MODEL, messages=QUESTION, temperature=0, max_tokens=24)
    response = client.responses.create(model=MODEL, input=QUESTION, temperature=0, max_output_tokens=24)
    assert response.output_text == chat.choices[0].message.content
    with client.responses.stream(model=MODEL, input=QUESTION, temperature=0, max_output_tokens=24) as stream:
        events = list(stream)
    assert events[-1].response.output_text == response.output_text
    assert response.usage.input_tokens == chat.usage.prompt_tokens


def test_a_message_is_the_chats_answer(server: ServerProcess, client: openai.OpenAI) -> None:
    chat = client.chat.completions.create(model=MODEL, messages=QUESTION, temperature=0, max_tokens=24)
    with anthropic.Anthropic(
        base_url=server.url, api_key="none", max_retries=0, _strict_response_validation=True
    ) as other:
        asked: dict[str, Any] = {"model": MODEL, "messages": QUESTION, "max_tokens": 24}
        asked["extra_body"] = {"temperature": 0}  # which its newest version no longer names
        assert other.messages.create(**asked).content[0].text == chat.choices[0].message.content
        with other.messages.stream(**asked) as stream:
            assert "".join(stream.text_stream) == chat.choices[0].message.content
        count = other.messages.count_tokens(model=MODEL, messages=QUESTION)
    assert count.input_tokens == chat.usage.prompt_tokens
