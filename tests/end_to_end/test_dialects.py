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
