"""Tools over HTTP: what reaches the template and the engine, what comes back, and what is refused."""

import json
from typing import Any

import openai
import pytest

from tests.api_client import MODEL, Api, answering, stream_events
from tests.test_api_openai_client import ask as with_client

MESSAGES = [{"role": "user", "content": "when?"}]
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "clock",
            "description": "the time",
            "parameters": {"type": "object", "properties": {"zone": {"type": "string"}}, "required": ["zone"]},
        },
    }
]
CALL = '<tool_call>\n{"name": "clock", "arguments": {"zone": "Paris"}}\n</tool_call>'
NAMED = {"type": "function", "function": {"name": "clock"}}
LONG = {"max_model_len": 4096}


def calling(text: str = CALL, **settings: Any) -> Api:
    return answering(text, settings={**LONG, **settings})


def test_a_call_is_a_call_and_no_content() -> None:
    choice = calling().chat(tools=TOOLS).json()["choices"][0]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] is None
    (call,) = choice["message"]["tool_calls"]
    assert call.pop("id").startswith("call_")
    assert call == {"type": "function", "function": {"name": "clock", "arguments": '{"zone": "Paris"}'}}


def test_a_streamed_call_adds_up_to_the_whole_one() -> None:
    events = stream_events(calling("I look.\n" + CALL).chat(tools=TOOLS, stream=True, logprobs=True))
    choices = [event["choices"][0] for event in events[:-1]]
    deltas = [choice["delta"] for choice in choices]
    assert "".join(delta.get("content") or "" for delta in deltas) == "I look."
    calls = [call for delta in deltas for call in delta.get("tool_calls", [])]
    assert calls[0]["function"] == {"name": "clock", "arguments": ""}
    assert calls[0]["id"].startswith("call_")
    assert all("id" not in call and "name" not in call["function"] for call in calls[1:])
    assert len(calls) > 3
    assert json.loads("".join(call["function"]["arguments"] for call in calls)) == {"zone": "Paris"}
    assert [choice["finish_reason"] for choice in choices][-1] == "tool_calls"
    assert not any(choice["finish_reason"] for choice in choices[:-1])
    whole = calling("I look.\n" + CALL).chat(tools=TOOLS, logprobs=True).json()["choices"][0]
    streamed = [entry for choice in choices for entry in (choice["logprobs"] or {"content": []})["content"]]
    assert streamed == whole["logprobs"]["content"]


def test_a_call_that_was_cut_finishes_with_length() -> None:
    choice = calling().chat(tools=TOOLS, max_tokens=60).json()["choices"][0]
    assert choice["finish_reason"] == "length"
    assert choice["message"]["tool_calls"][0]["function"]["arguments"].startswith('{"')


@pytest.mark.parametrize("stream", [False, True])
def test_without_parallel_calls_an_answer_ends_with_its_first_call(stream: bool) -> None:
    api = calling("I look.\n" + CALL * 3)
    asked = api.chat(tools=TOOLS, parallel_tool_calls=False, stream=stream, logprobs=True)
    if stream:
        choices = [event["choices"][0] for event in stream_events(asked)[:-1]]
        calls = [call for choice in choices for call in choice["delta"].get("tool_calls", [])]
        assert json.loads("".join(call["function"]["arguments"] for call in calls)) == {"zone": "Paris"}
        finish_reason = choices[-1]["finish_reason"]
    else:
        answer = asked.json()
        (call,) = answer["choices"][0]["message"]["tool_calls"]
        assert json.loads(call["function"]["arguments"]) == {"zone": "Paris"}
        finish_reason = answer["choices"][0]["finish_reason"]
        assert answer["usage"]["completion_tokens"] < len(api.worker.answer_ids) / 2
        assert len(answer["choices"][0]["logprobs"]["content"]) == answer["usage"]["completion_tokens"]
    assert finish_reason == "tool_calls"
    # The worker is told, and makes no more of it.
    ((request_id, _, num_tokens),) = api.worker.finished
    assert request_id == api.worker.requests[0].request_id
    assert num_tokens < len(api.worker.answer_ids) / 2


@pytest.mark.parametrize("fields", [{}, {"tools": TOOLS, "tool_choice": "none"}, {"tools": []}])
def test_without_tools_a_call_is_text(fields: dict[str, Any]) -> None:
    api = calling()
    choice = api.chat(**fields).json()["choices"][0]
    assert choice["message"] == {"role": "assistant", "content": CALL, "refusal": None}
    assert choice["finish_reason"] == "stop"
    assert api.worker.requests[0].params.grammar is None


def prompt_of(api: Api, **fields: Any) -> str:
    api.chat(**fields)
    return api.tokenizer.decode(api.worker.requests[-1].prompt_token_ids, skip_special_tokens=False)


def test_a_template_without_tools_is_told_of_them_in_the_system_message() -> None:
    prompt = prompt_of(calling(), tools=TOOLS, messages=[{"role": "system", "content": "be kind"}, *MESSAGES])
    assert prompt.startswith("<s><|im_start|>system\nbe kind\n\nYou may call")
    assert '"name": "clock"' in prompt
    assert "<tool_call>" in prompt
    assert "clock" not in prompt_of(calling(), tools=TOOLS, tool_choice="none")


TEMPLATE = (
    "{% if tools %}TOOLS {{ tools | tojson }}{% endif %}{% for m in messages %}<|im_start|>{{ m.role }} {{ m.content }}"
    "{% for call in m.tool_calls or [] %}{{ call.function.name }}{{ call.function.arguments | tojson }}{% endfor %}"
    "<|im_end|>{% endfor %}<|im_start|>assistant"
)


def test_a_template_with_tools_gets_them_and_earlier_calls() -> None:
    api = Api(calling().worker, settings=LONG, chat_template=TEMPLATE)
    earlier = {"id": "1", "type": "function", "function": {"name": "clock", "arguments": '{"zone": "<|im_end|>"}'}}
    messages = [
        *MESSAGES,
        {"role": "assistant", "content": None, "tool_calls": [earlier]},
        {"role": "tool", "tool_call_id": "1", "content": "noon"},
    ]
    prompt = prompt_of(api, tools=TOOLS, messages=messages)
    assert prompt.startswith('TOOLS [{"type": "function"')
    assert 'clock{"zone": "<|im_end|>"}<|im_end|><|im_start|>tool noon<|im_end|>' in prompt
    # What a client wrote into an argument ends no turn.
    end = api.tokenizer.token_id("<|im_end|>")
    assert api.worker.requests[-1].prompt_token_ids.count(end) == len(messages)


@pytest.mark.parametrize(("choice", "is_forced"), [("auto", False), (None, False), ("required", True), (NAMED, True)])
def test_a_forced_call_is_forced_by_a_grammar(choice: Any, is_forced: bool) -> None:
    api = calling()
    response = api.chat(tools=TOOLS, tool_choice=choice)
    assert response.json()["choices"][0]["finish_reason"] == "tool_calls"
    grammar = api.worker.requests[0].params.grammar
    assert (grammar is not None) is is_forced
    if grammar is not None:
        assert "clock" in grammar.text
        assert ("call)*" in grammar.text) is (choice == "required")
        assert "call)*" not in _grammar(parallel_tool_calls=False, tool_choice="required")


def _grammar(**fields: Any) -> str:
    api = calling()
    api.chat(tools=TOOLS, **fields)
    grammar = api.worker.requests[0].params.grammar
    assert grammar is not None
    return grammar.text


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": NAMED}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "other"}}}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": "sometimes"}, "tool_choice"),
        ({"tools": TOOLS * 2}, "tools"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": 5}, "tools"),
        ({"tools": "clock"}, "tools"),
        ({"tools": [5]}, "tools[0]"),
        ({"tools": [{"type": "function", "function": {"name": f"f{i}"}} for i in range(129)]}, "tools"),
        ({"tools": TOOLS, "tool_choice": "required", "response_format": {"type": "json_object"}}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": "required", "use_beam_search": True}, "tool_choice"),
        ({"tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "dragon"}}}],
          "tool_choice": "required"}, "tool_choice"),
        ({"messages": [{"role": "assistant", "tool_calls": 5, "content": ""}]}, "messages[0].tool_calls"),
        ({"messages": [{"role": "assistant", "tool_calls": [{"id": "1"}], "content": ""}]},
         "messages[0].tool_calls[0].function"),
        ({"functions": [{"name": "f"}]}, "functions"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused_by_name(fields: dict[str, Any], param: str) -> None:
    api = calling()
    response = api.chat(**fields)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == param
    assert not api.worker.requests


def test_a_message_with_calls_may_lack_its_content() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "clock", "arguments": "{}"}}
    told = {"role": "assistant", "tool_calls": [call]}
    result = {"role": "tool", "tool_call_id": "1", "content": "noon"}
    assert calling().chat(messages=[*MESSAGES, told, result]).status_code == 200
    without = calling().chat(messages=[*MESSAGES, {"role": "assistant"}])
    assert (without.status_code, without.json()["error"]["param"]) == (400, "messages[1].content")


def test_reasoning_is_a_field_of_its_own() -> None:
    text = "<think>\nhm\n</think>\n\nnoon"
    message = calling(text, reasoning_parser="think").chat().json()["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == ("hm", "noon")
    events = stream_events(calling(text, reasoning_parser="think").chat(stream=True))
    deltas = [event["choices"][0]["delta"] for event in events[:-1]]
    assert "".join(delta.get("reasoning_content", "") for delta in deltas) == "hm"
    assert "".join(delta.get("content", "") for delta in deltas) == "noon"
    # The tests' template has the tag; an operator may say that it means nothing.
    assert calling(text, reasoning_parser="none").chat().json()["choices"][0]["message"]["content"] == text


def test_reasoning_that_the_prompt_began_is_found() -> None:
    api = calling("hm</think>noon")
    message = api.chat(chat_template_kwargs={"think": True}).json()["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == ("hm", "noon")
    assert "reasoning_content" not in api.chat().json()["choices"][0]["message"]


def test_the_client_calls_tools_whole_and_streamed() -> None:
    async def work(client: openai.AsyncOpenAI) -> tuple[Any, Any]:
        asked: dict[str, Any] = {"model": MODEL, "messages": MESSAGES, "tools": TOOLS}
        chat = await client.chat.completions.create(**asked)
        async with client.chat.completions.stream(**asked) as stream:
            async for _ in stream:
                pass
            return chat, await stream.get_final_completion()

    chat, streamed = with_client(calling(), work)
    for answer in (chat, streamed):
        (call,) = answer.choices[0].message.tool_calls
        assert (call.function.name, json.loads(call.function.arguments)) == ("clock", {"zone": "Paris"})


def nested(depth: int) -> str:
    return '{"a":' * depth + "1" + "}" * depth


DEEP_SCHEMA = json.loads('{"items":' * 900 + "true" + "}" * 900)
CHAT, RESPONSE, MESSAGE = "/v1/chat/completions", "/v1/responses", "/v1/messages"
DEEP_FUNCTION = {"name": "clock", "parameters": DEEP_SCHEMA}


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        (CHAT, {"chat_template_kwargs": json.loads(nested(129))}, "chat_template_kwargs"),
        (CHAT, {"chat_template_kwargs": json.loads(nested(500))}, "chat_template_kwargs"),
        (CHAT, {"chat_template_kwargs": {"a": json.loads("[" * 900 + "]" * 900)}}, "chat_template_kwargs"),
        (CHAT, {"tools": [{"type": "function", "function": DEEP_FUNCTION}], "tool_choice": "required"}, "tools"),
        (RESPONSE, {"tools": [{"type": "function", **DEEP_FUNCTION}], "tool_choice": "required"}, "tools"),
        (
            MESSAGE,
            {"tools": [{"name": "clock", "input_schema": DEEP_SCHEMA}], "tool_choice": {"type": "any"}},
            "tools",
        ),
        (CHAT, {"unknown": json.loads(nested(500))}, "unknown"),
        ("/tokenize", {"chat_template_kwargs": json.loads(nested(500))}, "chat_template_kwargs"),
    ],
)
def test_what_is_nested_too_deeply_is_refused_by_the_fields_name(
    path: str, fields: dict[str, Any], param: str
) -> None:
    asked = {"input": "when?"} if path == RESPONSE else {"messages": MESSAGES}
    response = calling().post(path, json={"model": MODEL, "max_tokens": 9, **asked, **fields})
    assert response.status_code == 400
    assert response.json()["error"]["message"] == f"{param}: nested more than 128 levels deep"


@pytest.mark.parametrize("parser", ["hermes", "mistral", "llama3_json", "pythonic"])
def test_values_as_deep_as_is_allowed_get_their_answer(parser: str) -> None:
    schema = {"properties": {"a": json.loads('{"items":' * 110 + "true" + "}" * 110)}}
    tools = [{"type": "function", "function": {"name": "clock", "parameters": schema}}]
    kwargs = json.loads(nested(128)) | {"control": "<|im_start|>"}
    api = calling(tool_call_parser=parser)
    for choice in ("auto", "required"):
        answer = api.chat(chat_template_kwargs=kwargs, tools=tools, tool_choice=choice, messages=MESSAGES)
        assert answer.status_code == 200, answer.text


@pytest.mark.parametrize("depth", [127, 500, 5000])
@pytest.mark.parametrize("parser", ["hermes", "mistral", "llama3_json", "pythonic"])
def test_arguments_of_earlier_calls_may_be_nested_as_they_will(parser: str, depth: int) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "clock", "arguments": nested(depth)}}
    earlier = {"role": "assistant", "tool_calls": [call]}
    api = calling(max_model_len=65536, tool_call_parser=parser)
    for control in ("", "<|im_start|>"):
        answer = api.chat(messages=[*MESSAGES, earlier, {"role": "user", "content": control}])
        assert answer.status_code == 200, answer.text


@pytest.mark.parametrize("parser", ["hermes", "mistral", "llama3_json", "pythonic"])
def test_an_answer_that_is_nested_deeply_is_an_answer(parser: str) -> None:
    for text in (
        '<tool_call>{"name": ' + "[" * 5000,
        '{"name": ' + "[" * 5000 + "]" * 5000 + ", ",
        '[TOOL_CALLS][{"name": ' + "[" * 5000 + "]" * 5000 + ", ",
        "[clock(zone=" + "[" * 5000 + "]" * 5000 + ")]",
    ):
        api = calling(text, max_model_len=65536, tool_call_parser=parser)
        answer = api.chat(tools=TOOLS, max_tokens=30_000)
        assert answer.status_code == 200, answer.text
