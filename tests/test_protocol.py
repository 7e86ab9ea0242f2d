"""Requests: what is refused, by which field's name, and what counts as not set."""

import copy
import inspect
import json
import logging
import pickle
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from ray.serve._private.constants import RAY_SERVE_REPLICA_GRPC_MAX_MESSAGE_LENGTH
from transformers import PreTrainedTokenizerBase

from deployments.protocol.errors import ApiError
from deployments.protocol.fields import RENDERING_ARGUMENTS
from deployments.protocol.requests import ChatRequest, CompletionRequest, GenerationRequest
from deployments.protocol.sampling import MAX_PROMPT_LOGPROB_ENTRIES, sampling_params
from worker.types import SamplingParams

MESSAGES = [{"role": "user", "content": "hi"}]


def chat(**fields: Any) -> ChatRequest:
    return ChatRequest.parse({"model": "m", "messages": MESSAGES, **fields})


def completion(**fields: Any) -> CompletionRequest:
    return CompletionRequest.parse({"model": "m", "prompt": "hi", **fields})


def params(request: GenerationRequest, num_prompt_tokens: int = 10, **defaults: Any) -> SamplingParams:
    return sampling_params(
        request,
        num_prompt_tokens=num_prompt_tokens,
        prompt_param="prompt",
        max_model_len=100,
        vocab_size=1000,
        generation_defaults=defaults,
    )


WRONG_FOR_BOTH: list[tuple[str, Any]] = [
    ("model", 5),
    ("model", None),
    *(("max_tokens", value) for value in (-5, 1.5, "5", True, [], {})),
    *(("max_completion_tokens", value) for value in (-1, "5", 1.5, True)),
    *(("temperature", value) for value in (-0.1, 999999, "1", True, float("nan"), float("inf"), [1])),
    *(("top_p", value) for value in (-1, 1.1, "1", float("nan"))),
    *(("top_k", value) for value in (-2, 1.5, "1", 2**40)),
    *(("min_p", value) for value in (-0.1, 1.1)),
    *(("seed", value) for value in (1.5, "1", 2**63, -(2**63) - 1)),
    *(("stop", value) for value in (5, {}, [5], [""], ["a", ""], ["a"] * 17, ["a" * 2000])),
    *(("stop_token_ids", value) for value in (5, "5", ["5"], [1.5])),
    *(("min_tokens", value) for value in (-1, "1")),
    *(("presence_penalty", value) for value in (-2.1, 2.1, "0")),
    *(("frequency_penalty", value) for value in (-2.1, 2.1)),
    *(("repetition_penalty", value) for value in (0, -1, 11, float("nan"))),
    *(("logit_bias", value) for value in ([], "")),
    *(("logit_bias", value) for value in (5, "x", [1], {"AI": -100}, {"1": "x"}, {"1": 1e9}, {"-1": 5}, {"1.0": 5})),
    *(("n", value) for value in (0, -1, "1", 1.5, True)),
    *(("best_of", value) for value in (0, "2", True)),
    *(("beam_width", value) for value in (0, 4, "4")),
    *(("length_penalty", value) for value in (2.0, -11, "1", float("nan"))),
    *(("early_stopping", value) for value in (True, "never", "always", 1)),
    *(("priority", value) for value in (101, -101, 1.5, "1", True)),
    *(("cache_salt", value) for value in (5, "x" * 257)),
    *(("stream", value) for value in ("true", 1, [])),
    *(("stream_options", value) for value in (5, [], "x", {"include_usage": True}, {"include_usage": 1})),
    ("ignore_eos", "yes"),
    ("user", 5),
    ("use_beam_search", "yes"),
    *(("response_format", value) for value in ({"type": "xml"}, {"type": "json_schema"}, 5, [], "")),
    *(("tools", value) for value in (5, "x", "", {}, [{"type": "function"}])),
    *(("tool_choice", value) for value in ("required", "", [], {})),
    *(("functions", value) for value in ([{}], "", {})),
    *(("function_call", value) for value in ("", {}, {"name": "f"})),
    ("suffix", "x"),
    ("chat_template", "{{ messages }}"),
    ("web_search_options", {}),
    ("moderation", {"model": "m"}),
    ("add_generation_prompt", False),
    ("continue_final_message", True),
    ("documents", [{"text": "a"}]),
    ("truncate_prompt_tokens", 5),
    ("allowed_token_ids", [5]),
    ("bad_words", ["a"]),
    ("logits_processors", ["a.b"]),
    ("prompt_embeds", "a"),
    *(("prompt_logprobs", value) for value in (-1, 21, "1", True)),
]
WRONG_FOR_COMPLETION: list[tuple[str, Any]] = [
    *(("prompt", value) for value in (None, 5, {}, [1.5], [True], [1, "a"], [None], [["a"]], [[1, True]])),
    *(("logprobs", value) for value in (-1, 21, "1", True)),
    ("echo", "yes"),
]
WRONG_FOR_CHAT: list[tuple[str, Any]] = [
    *(("messages", value) for value in (None, 5, "x", {}, [])),
    *(("logprobs", value) for value in (1, "true")),
    *(("top_logprobs", value) for value in (-1, 21, "1")),
    ("max_completion_tokens", 0),
    *(("reasoning_effort", value) for value in (5, "x" * 33)),
    ("max_tokens", 0),
    *(("chat_template_kwargs", value) for value in (5, "x", [], {"messages": []}, {"chat_template": "x"})),
]


def param_of(body: dict[str, Any], kind: type[GenerationRequest]) -> str:
    with pytest.raises(ApiError) as caught:
        kind.parse(body)
    assert caught.value.status == 400
    error = caught.value.body["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error"
    assert error["param"] in error["message"]
    return error["param"]


@pytest.mark.parametrize(("field", "value"), WRONG_FOR_BOTH + WRONG_FOR_COMPLETION)
def test_a_wrong_value_in_a_completion_is_refused_by_the_fields_name(field: str, value: Any) -> None:
    param = param_of({"model": "m", "prompt": "hi", field: value}, CompletionRequest)
    assert param.split("[")[0].split(".")[0] == field


@pytest.mark.parametrize(("field", "value"), WRONG_FOR_BOTH + WRONG_FOR_CHAT)
def test_a_wrong_value_in_a_chat_is_refused_by_the_fields_name(field: str, value: Any) -> None:
    param = param_of({"model": "m", "messages": MESSAGES, field: value}, ChatRequest)
    assert param.split("[")[0].split(".")[0] == field


@pytest.mark.parametrize(
    ("message", "param"),
    [
        (5, "messages[1]"),
        ({"role": "user"}, "messages[1].content"),
        ({"content": "x"}, "messages[1].role"),
        ({"role": "root", "content": "x"}, "messages[1].role"),
        ({"role": "user", "content": None}, "messages[1].content"),
        ({"role": "user", "content": 5}, "messages[1].content"),
        ({"role": "user", "content": [{"type": "image_url"}]}, "messages[1].content"),
        ({"role": "user", "content": [{"type": "text"}]}, "messages[1].content"),
        ({"role": "user", "content": ["x"]}, "messages[1].content"),
        ({"role": "tool", "content": "x"}, "messages[1].tool_call_id"),
        ({"role": "tool", "content": "x", "tool_call_id": None}, "messages[1].tool_call_id"),
        ({"role": "tool", "content": "x", "tool_call_id": 5}, "messages[1].tool_call_id"),
    ],
)
def test_a_wrong_message_is_refused_by_its_place(message: Any, param: str) -> None:
    assert param_of({"model": "m", "messages": [*MESSAGES, message]}, ChatRequest) == param


@pytest.mark.parametrize(
    "choice",
    ["sometimes", 5, [1], {"type": "x"}, {"type": "function"}, {"type": "function", "function": {"name": "a b"}}],
)
def test_a_wrong_tool_choice_is_told_what_it_may_be(choice: Any) -> None:
    with pytest.raises(ApiError) as caught:
        chat(tool_choice=choice)
    assert caught.value.param == "tool_choice"
    assert caught.value.message.startswith("tool_choice: must be 'none', 'auto', 'required', or an object")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"stop": 5}, "stop: must be a string or a list of strings"),
        ({"stop": {}}, "stop: must be a string or a list of strings"),
        ({"functions": [{}]}, "functions: calling functions by this field is not supported; use tools instead"),
        ({"bad_words": ["a"]}, "bad_words: a list of forbidden words is not supported; use logit_bias instead"),
        ({"response_format": ""}, "response_format: must be an object"),
        ({"logit_bias": []}, "logit_bias: must be an object"),
        ({"stream_options": 5}, "stream_options: must be an object"),
        ({"web_search_options": {}}, "web_search_options: searching the web is not supported"),
        (
            {"stop": "a", "use_beam_search": True},
            "stop: together with use_beam_search it is not supported",
        ),
    ],
)
def test_what_is_wrong_is_said_in_whole_sentences(fields: dict[str, Any], message: str) -> None:
    for ask in (chat, completion):
        with pytest.raises(ApiError) as caught:
            ask(**fields)
        assert caught.value.message == message


def test_a_choice_among_allowed_tools_is_refused_by_name() -> None:
    with pytest.raises(ApiError) as caught:
        chat(tool_choice={"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": []}})
    assert (caught.value.param, caught.value.code) == ("tool_choice", "unsupported_parameter")
    assert "allowed_tools" in caught.value.message


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"guided_json": 5}, "guided_json"),
        ({"structured_outputs": {"json": 5}}, "structured_outputs.json"),
        ({"structured_outputs": {"json": "{}", "str": 5}}, "structured_outputs.str"),
        ({"response_format": {"type": "text", "json_schema": {"name": "a"}}}, "response_format.json_schema.schema"),
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"logit_bias": {"1": 1000}}, "logit_bias[1]"),
    ],
)
def test_the_place_of_an_error_holds_names_and_indices_and_no_types(fields: dict[str, Any], param: str) -> None:
    assert param_of({"model": "m", "messages": MESSAGES, **fields}, ChatRequest) == param


def test_an_assistants_message_may_be_without_text() -> None:
    request = chat(messages=[*MESSAGES, {"role": "assistant", "content": None}])
    assert request.messages[-1].content == ""


def test_errors_never_quote_what_the_client_wrote() -> None:
    for value in ({"role": "user", "content": {"secret": 1}}, {"role": "secret", "content": "secret"}, "secret"):
        with pytest.raises(ApiError) as caught:
            chat(messages=[value])
        assert "secret" not in json.dumps(caught.value.body)


OPTIONAL = [name for name in ChatRequest.model_fields | CompletionRequest.model_fields if name not in ("model",)]


@pytest.mark.parametrize("field", [name for name in OPTIONAL if name not in ("prompt", "messages")])
def test_null_means_the_default(field: str) -> None:
    assert params(chat(**{field: None}, seed=1) if field != "seed" else chat(seed=None)).max_tokens == 90
    assert completion(**{field: None}) == completion()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("response_format", {}),
        ("logit_bias", {}),
        ("stop", ""),
        ("stop", []),
        ("stop_token_ids", []),
        ("tools", []),
        ("tool_choice", "auto"),
        ("tool_choice", "none"),
        ("functions", []),
        ("response_format", {"type": "text"}),
        ("suffix", ""),
        ("best_of", 1),
        ("n", 1),
        ("use_beam_search", False),
        ("length_penalty", 1.0),
        ("early_stopping", False),
        ("cache_salt", ""),
        ("priority", 0),
        ("stream_options", {}),
        ("user", ""),
    ],
)
def test_what_clients_send_for_unset_is_unset(field: str, value: Any) -> None:
    request = params(completion(**{field: value}, seed=1))
    assert request == params(completion(seed=1))


def test_text_parts_are_the_same_as_the_joined_string() -> None:
    parts = [{"type": "text", "text": "one "}, {"type": "text", "text": "two"}]
    request = chat(messages=[{"role": "system", "content": parts}, {"role": "user", "content": parts}])
    assert [message.content for message in request.messages] == ["one two", "one two"]


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [
        ("a", ["a"]),
        ("", [""]),
        ([1, 2], [[1, 2]]),
        (["a", "b"], ["a", "b"]),
        ([[1], [2, 3]], [[1], [2, 3]]),
        (["a", [1]], ["a", [1]]),
        ([], []),
        ([[]], [[]]),
    ],
)
def test_every_form_of_prompt_is_a_list_of_prompts(prompt: Any, prompts: list[Any]) -> None:
    assert completion(prompt=prompt).prompt == prompts


def test_unknown_fields_are_named_in_one_warning_without_their_values(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        chat(flavour="secret", **{"odd\nname": 1})
    assert len(caplog.records) == 1
    assert "flavour" in caplog.text
    assert "odd\\nname" in caplog.text
    assert "secret" not in caplog.text


def test_known_fields_log_nothing(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        chat(temperature=1, user="me", tools=[])
    assert not caplog.records


@pytest.mark.parametrize("ask", [chat, completion])
def test_max_completion_tokens_wins(ask: Callable[..., GenerationRequest]) -> None:
    assert params(ask(max_completion_tokens=3)).max_tokens == 3
    assert params(ask(max_completion_tokens=3, max_tokens=5)).max_tokens == 3
    with pytest.raises(ApiError) as caught:
        params(ask(max_completion_tokens=91, max_tokens=5))
    assert caught.value.param == "max_completion_tokens"
    assert params(completion(max_completion_tokens=0, max_tokens=5)).max_tokens == 0
    assert params(chat(max_completion_tokens=3, max_tokens=7)).max_tokens == 3
    assert params(chat(max_completion_tokens=None, max_tokens=7)).max_tokens == 7


def test_without_a_limit_the_answer_may_fill_the_context() -> None:
    assert params(completion(), num_prompt_tokens=40).max_tokens == 60


def test_a_prompt_one_below_the_context_gets_exactly_one_token() -> None:
    assert params(completion(), num_prompt_tokens=99).max_tokens == 1
    assert params(completion(max_tokens=1), num_prompt_tokens=99).max_tokens == 1


@pytest.mark.parametrize(
    ("num_prompt_tokens", "fields", "param"),
    [
        (100, {}, "prompt"),
        (101, {"max_tokens": 1}, "prompt"),
        (99, {"max_tokens": 2}, "max_tokens"),
        (10, {"max_tokens": 91}, "max_tokens"),
        (10, {"max_completion_tokens": 91, "max_tokens": 1}, "max_completion_tokens"),
    ],
)
def test_what_the_context_cannot_hold_is_refused_with_the_numbers(
    num_prompt_tokens: int, fields: dict[str, int], param: str
) -> None:
    with pytest.raises(ApiError) as caught:
        params(chat(**fields), num_prompt_tokens=num_prompt_tokens)
    error = caught.value
    assert (error.status, error.code, error.param) == (400, "context_length_exceeded", param)
    assert "100 tokens" in error.message
    assert f"{num_prompt_tokens} tokens" in error.message


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("stop_token_ids", [1000]),
        ("stop_token_ids", [-1]),
        ("logit_bias", {"1000": 5}),
        ("logit_bias", {"999999": 5}),
        ("min_tokens", 91),
    ],
)
def test_what_the_model_does_not_have_is_refused_by_name(field: str, value: Any) -> None:
    with pytest.raises(ApiError) as caught:
        params(completion(**{field: value}))
    assert (caught.value.status, caught.value.param) == (400, field)


def test_the_models_own_defaults_apply_where_the_field_is_absent() -> None:
    defaults = {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "min_p": 0.1, "repetition_penalty": 1.1}
    ours = params(completion(), **defaults)
    assert {name: getattr(ours, name) for name in defaults} == defaults
    theirs = params(completion(temperature=0, top_k=-1, top_p=1, min_p=0, repetition_penalty=1), **defaults)
    assert (theirs.temperature, theirs.top_k, theirs.top_p, theirs.min_p) == (0.0, 0, 1.0, 0.0)
    assert theirs.repetition_penalty == 1.0
    assert params(completion()).temperature == 1.0


def test_top_p_one_is_off_and_zero_is_greedy() -> None:
    assert params(completion(top_p=1)).top_p == 1.0
    zero = params(completion(top_p=0, temperature=1.5))
    assert (zero.temperature, zero.top_p) == (0.0, 1.0)


def test_every_unseeded_request_draws_its_own_seed() -> None:
    assert params(completion(seed=7)).seed == 7
    assert params(completion(seed=-1)).seed >= 0
    assert len({params(completion()).seed for _ in range(20)}) == 20


def test_logprobs_mean_what_each_route_says() -> None:
    assert params(completion()).logprobs is None
    assert params(completion(logprobs=0)).logprobs == 0
    assert params(completion(logprobs=5)).logprobs == 5
    assert params(chat()).logprobs is None
    assert params(chat(logprobs=False)).logprobs is None
    assert params(chat(logprobs=True)).logprobs == 0
    assert params(chat(logprobs=True, top_logprobs=3)).logprobs == 3


def test_an_echo_with_logprobs_asks_for_those_of_the_prompt() -> None:
    asked: list[tuple[dict[str, Any], int | None]] = [
        ({"logprobs": 2}, None),
        ({"logprobs": 2, "echo": True}, 2),
        ({"echo": True}, None),
        ({"prompt_logprobs": 0}, 0),
        ({"prompt_logprobs": 3, "logprobs": 1, "echo": True}, 3),
        ({"prompt_logprobs": 1, "logprobs": 0}, 1),
    ]
    for fields, expected in asked:
        assert params(completion(**fields)).prompt_logprobs == expected
    assert params(chat(prompt_logprobs=4)).prompt_logprobs == 4
    assert params(chat(logprobs=True)).prompt_logprobs is None


@pytest.mark.parametrize("num_alternatives", [0, 1, 20])
def test_the_largest_scores_of_a_prompt_fit_into_one_message(num_alternatives: int) -> None:
    num_tokens = MAX_PROMPT_LOGPROB_ENTRIES // (1 + num_alternatives) // 10  # a tenth, for speed
    alternatives = [(200_000 + rank, -0.1 - rank) for rank in range(num_alternatives)]
    # As they are in a worker: no object is met twice.
    scores = [(-0.5 - place, 100_000 + place, copy.deepcopy(alternatives)) for place in range(num_tokens)]
    assert 10 * len(pickle.dumps(scores)) < RAY_SERVE_REPLICA_GRPC_MAX_MESSAGE_LENGTH


@pytest.mark.parametrize(
    ("fields", "param"), [({"prompt_logprobs": 20}, "prompt_logprobs"), ({"echo": True}, "logprobs")]
)
def test_more_scores_of_a_prompt_than_one_message_holds_are_refused(fields: dict[str, Any], param: str) -> None:
    request = completion(logprobs=20, **fields)
    longest = MAX_PROMPT_LOGPROB_ENTRIES // 21
    for num_tokens in (longest, longest + 1):
        ask = partial(
            sampling_params, request, num_prompt_tokens=num_tokens, prompt_param="prompt", max_model_len=10**6,
            vocab_size=1000, generation_defaults={},
        )  # fmt: skip
        if num_tokens == longest:
            assert ask().prompt_logprobs == 20
            continue
        with pytest.raises(ApiError) as caught:
            ask()
        assert (caught.value.status, caught.value.param) == (400, param)
        assert f"at most 19 for a prompt of {num_tokens} tokens" in caught.value.message


def test_a_prompt_may_fill_the_context_where_no_token_is_wanted() -> None:
    assert params(completion(max_tokens=0), num_prompt_tokens=100).max_tokens == 0
    with pytest.raises(ApiError) as caught:
        params(completion(max_tokens=0), num_prompt_tokens=101)
    assert (caught.value.code, caught.value.param) == ("context_length_exceeded", "prompt")


def test_every_argument_of_the_librarys_rendering_is_kept_from_template_kwargs() -> None:
    arguments = inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters
    assert arguments.keys() <= RENDERING_ARGUMENTS
    assert chat(chat_template_kwargs={"enable_thinking": False}).chat_template_kwargs == {"enable_thinking": False}


def test_top_logprobs_without_logprobs_are_refused() -> None:
    assert param_of({"model": "m", "messages": MESSAGES, "top_logprobs": 3}, ChatRequest) == "top_logprobs"
    assert chat(top_logprobs=0).num_logprobs is None
