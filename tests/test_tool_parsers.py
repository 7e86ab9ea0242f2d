"""Tool calls and reasoning in text: each format, however the text is cut; and grammars that force what parsers read."""

import json
import random
import shutil
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from llguidance import LLMatcher

from deployments.protocol.requests import ChatRequest
from deployments.protocol.tools import Function
from deployments.tool_calls.answer_parts import AnswerParts, PartsOptions
from deployments.tool_calls.formats import tool_call_format
from deployments.tool_calls.hermes import HermesFormat
from deployments.tool_calls.llama3_json import Llama3JsonFormat
from deployments.tool_calls.mistral import MistralFormat
from deployments.tool_calls.pieces import CallArguments, CallBegin, Content, Piece, Reasoning, ToolCallFormat
from deployments.tool_calls.prompting import template_messages, told_messages
from deployments.tool_calls.pythonic import PythonicFormat
from tests.tiny_tokenizers import folder_of
from worker.grammar.library import compile_grammar, library_grammar, library_tokenizer
from worker.text import Tokenizer

NAMES = frozenset({"weather", "clock"})
FORMATS: list[ToolCallFormat] = [
    HermesFormat(),
    MistralFormat(None),
    MistralFormat(None, has_names=True),
    Llama3JsonFormat(shows_special_tokens=False),
    PythonicFormat(),
]
Found = tuple[str, str, list[tuple[str, str]]]


def found_in(pieces: list[Piece]) -> Found:
    """(reasoning, content, [(name, arguments), ...])"""
    calls: dict[int, list[str]] = {}
    for piece in pieces:
        if isinstance(piece, CallBegin):
            assert piece.index == len(calls)
            calls[piece.index] = [piece.name, ""]
        elif isinstance(piece, CallArguments):
            calls[piece.index][1] += piece.text
    reasoning = "".join(piece.text for piece in pieces if isinstance(piece, Reasoning))
    content = "".join(piece.text for piece in pieces if isinstance(piece, Content))
    return reasoning, content, [(name, arguments) for name, arguments in calls.values()]


def parse(options: PartsOptions, text: str, cuts: list[int] | None = None) -> Found:
    parts = AnswerParts(options)
    places = [0, *(cuts or []), len(text)]
    pieces: list[Piece] = []
    for start, end in pairwise(places):
        pieces += parts.push(text[start:end], is_last=False)
    pieces += parts.push("", is_last=True)
    return found_in(pieces)


def parse_all_ways(options: PartsOptions, text: str) -> Found:
    """As a whole, one character at a time, and cut once anywhere: always the same."""
    whole = parse(options, text)
    assert parse(options, text, list(range(1, len(text)))) == whole
    for cut in range(1, len(text)):
        assert parse(options, text, [cut]) == whole
    return whole


def calls_of(call_format: ToolCallFormat, text: str) -> tuple[str, list[tuple[str, Any]]]:
    _, content, calls = parse_all_ways(PartsOptions(call_format, NAMES), text)
    return content, [(name, json.loads(arguments)) for name, arguments in calls]


HERMES, MISTRAL, NAMED_MISTRAL, LLAMA3, PYTHONIC = FORMATS


@pytest.mark.parametrize(
    ("call_format", "text", "content", "calls"),
    [
        (
            HERMES,
            '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris", "days": [1, 2]}}\n</tool_call>',
            "",
            [("weather", {"city": "Paris", "days": [1, 2]})],
        ),
        (
            HERMES,
            'Let me see.\n<tool_call>{"arguments": {"a": "}\\"{<"}, "name": "f"}</tool_call>\n'
            '<tool_call>\n{"name":"g"}\n</tool_call> Done.',
            "Let me see. Done.",
            [("f", {"a": '}"{<'}), ("g", {})],
        ),
        (HERMES, '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>', "", [("f", {"a": 1})]),
        (HERMES, '<tool_call>{"name": "f", "arguments": null}</tool_call>', "", [("f", {})]),
        (HERMES, "a < b <tool", "a < b <tool", []),
        (HERMES, "no call at all \n", "no call at all \n", []),
        (HERMES, '{"name": "f", "arguments": {}}', '{"name": "f", "arguments": {}}', []),
        (MISTRAL, '[TOOL_CALLS][{"name": "f", "arguments": {"a": 1}}]', "", [("f", {"a": 1})]),
        (
            MISTRAL,
            '[TOOL_CALLS] [{"name": "f", "arguments": {"a": [{}]}}, {"name": "g", "arguments": {}, "id": "x"}]',
            "",
            [("f", {"a": [{}]}), ("g", {})],
        ),
        (MISTRAL, "see [1] and [TOOL", "see [1] and [TOOL", []),
        (NAMED_MISTRAL, '[TOOL_CALLS]f[ARGS]{"a": {"b": "}"}}', "", [("f", {"a": {"b": "}"}})]),
        (
            NAMED_MISTRAL,
            'Let me.\n[TOOL_CALLS]get-it.2[CALL_ID]x8Y[ARGS] {"a": 1} [TOOL_CALLS]g{}[TOOL_CALLS]h[CALL_ID]1[ARGS]{}',
            "Let me.",
            [("get-it.2", {"a": 1}), ("g", {}), ("h", {})],
        ),
        (NAMED_MISTRAL, '[TOOL_CALLS][{"name": "f", "arguments": {}}] Done.', "Done.", [("f", {})]),
        (NAMED_MISTRAL, '[TOOL_CALLS]f[ARGS]{"a": 1} Done', "Done", [("f", {"a": 1})]),
        (NAMED_MISTRAL, "[TOOL_CALLS]no call at all", "no call at all", []),
        (NAMED_MISTRAL, "[TOOL_CALLS]get_wea", "get_wea", []),
        (NAMED_MISTRAL, "[TOOL_CALLS]f[ARGS]5", "f[ARGS]5", []),
        (LLAMA3, '{"name": "f", "parameters": {"a": 1}}', "", [("f", {"a": 1})]),
        (
            LLAMA3,
            '<|python_tag|>{"type": "function", "name": "f", "parameters": {}}; {"name": "g", "parameters": {"b": 2}}',
            "",
            [("f", {}), ("g", {"b": 2})],
        ),
        (LLAMA3, '{"answer": {"name": "x"}} and more', '{"answer": {"name": "x"}} and more', []),
        (LLAMA3, "{ is a brace", "{ is a brace", []),
        (LLAMA3, "plain {text}", "plain {text}", []),
        (LLAMA3, " \n", " \n", []),
        (
            PYTHONIC,
            '[weather(city="Paris", days=[1, -2], deep={"a": None}), clock()]',
            "",
            [("weather", {"city": "Paris", "days": [1, -2], "deep": {"a": None}}), ("clock", {})],
        ),
        (PYTHONIC, "[weather(ok=true, no=False, nil=null)]", "", [("weather", {"ok": True, "no": False, "nil": None})]),
        (PYTHONIC, "[1, 2]", "[1, 2]", []),
        (PYTHONIC, "[other(a=1)]", "[other(a=1)]", []),
        (PYTHONIC, '[weather("Paris")]', '[weather("Paris")]', []),
        (PYTHONIC, "[weather(a=__import__)]", "[weather(a=__import__)]", []),
        (PYTHONIC, "[weather(a=1", "[weather(a=1", []),
        (PYTHONIC, "[" * 5000, "[" * 5000, []),
        (PYTHONIC, "hello [weather()]", "hello [weather()]", []),
    ],
)
def test_calls_are_found_however_the_text_is_cut(
    call_format: ToolCallFormat, text: str, content: str, calls: list[tuple[str, Any]]
) -> None:
    if len(text) > 1000:
        assert parse(PartsOptions(call_format, NAMES), text) == ("", content, calls)
    else:
        assert calls_of(call_format, text) == (content, calls)


def test_arguments_arrive_while_they_are_written() -> None:
    parser = HermesFormat().parser(NAMES)
    begun = parser.push('<tool_call>\n{"name": "f", "arguments": {"a": "lo')
    assert begun == [CallBegin(0, "f"), CallArguments(0, '{"a": "lo')]
    assert parser.push('ng"}') == [CallArguments(0, 'ng"}')]
    assert parser.push("}\n</tool_call>") == []


def test_a_call_that_was_cut_keeps_what_was_written() -> None:
    options = PartsOptions(HermesFormat(), NAMES)
    text = '<tool_call>\n{"name": "f", "arguments": {"a": "lo'
    assert parse_all_ways(options, text) == ("", "", [("f", '{"a": "lo')])


def test_without_parallel_calls_those_after_the_first_are_left_out() -> None:
    text = '<tool_call>{"name": "f", "arguments": {}}</tool_call>' * 3
    assert parse_all_ways(PartsOptions(HermesFormat(), NAMES, is_parallel=False), text) == ("", "", [("f", "{}")])


@pytest.mark.parametrize(
    ("text", "is_open", "expected"),
    [
        ("<think>\nhm, so\n</think>\n\nyes", False, ("hm, so", "yes")),
        ("hm, so\n</think>\n\nyes", True, ("hm, so", "yes")),
        ("yes <think>", False, ("", "yes <think>")),
        ("<thin", False, ("", "<thin")),
        ("<think>never ends </thin", False, ("never ends </thin", "")),
        ("<think></think>yes", False, ("", "yes")),
        ("", False, ("", "")),
    ],
)
def test_reasoning_comes_apart_from_the_answer(text: str, is_open: bool, expected: tuple[str, str]) -> None:
    options = PartsOptions(has_reasoning=True, is_reasoning_open=is_open)
    assert parse_all_ways(options, text)[:2] == expected


def test_reasoning_comes_before_calls() -> None:
    options = PartsOptions(HermesFormat(), NAMES, has_reasoning=True)
    text = '<think>call <tool_call>?</think>\n<tool_call>{"name": "f", "arguments": {}}</tool_call>'
    assert parse_all_ways(options, text) == ("call <tool_call>?", "", [("f", "{}")])


FUNCTIONS = [
    Function(
        name="weather",
        parameters={
            "type": "object",
            "properties": {
                "city": {"type": "string", "maxLength": 8},
                "unit": {"enum": ["C", "F"]},
                "tree": {"$ref": "#/$defs/tree"},
            },
            "required": ["city"],
            "additionalProperties": False,
            "$defs": {
                "tree": {
                    "type": "object",
                    "properties": {"below": {"anyOf": [{"$ref": "#/$defs/tree"}, {"type": "null"}]}},
                    "required": ["below"],
                    "additionalProperties": False,
                }
            },
        },
    ),
    Function(name="clock"),
]
#: a byte a token, and one to end with
END = 256


def matcher_of(call_format: ToolCallFormat, functions: list[Function], *, is_parallel: bool) -> LLMatcher:
    vocabulary = [bytes([byte]) for byte in range(256)] + [b"</s>"]
    spec = call_format.grammar(functions, is_parallel=is_parallel)
    return compile_grammar(library_tokenizer(vocabulary, [END], [END]), library_grammar(spec))


def random_answer(matcher: LLMatcher, rng: random.Random) -> str:
    """A text that the grammar allows, ended as soon as it may."""
    answer = bytearray()
    while not matcher.is_stopped() and len(answer) < 2000:
        bits = matcher.compute_bitmask()
        allowed = [token for token in range(257) if bits[token // 8] >> (token % 8) & 1]
        if END in allowed:
            break
        plain = [token for token in allowed if 0x20 < token < 0x7F] or allowed
        closing = [token for token in plain if chr(token) in '"}])']
        token = rng.choice(closing if closing and rng.random() < 0.5 else plain)
        assert matcher.consume_token(token)
        answer.append(token)
    return answer.decode()


@pytest.mark.parametrize("call_format", FORMATS, ids=lambda call_format: call_format.name)
@pytest.mark.parametrize("is_parallel", [False, True])
def test_what_a_grammar_forces_is_a_call_that_the_parser_finds(call_format: ToolCallFormat, is_parallel: bool) -> None:
    rng = random.Random(7)
    matcher = matcher_of(call_format, FUNCTIONS, is_parallel=is_parallel)
    names = set()
    for _ in range(30):
        text = random_answer(matcher.deep_copy(), rng)
        content, calls = calls_of(call_format, text) if len(text) < 200 else _calls_of_long(call_format, text)
        assert content == "", text
        assert len(calls) >= 1 if is_parallel else len(calls) == 1, text
        for name, arguments in calls:
            names.add(name)
            assert arguments.keys() <= {"city", "unit", "tree"}
            assert ("city" in arguments) is (name == "weather")
            assert arguments.get("unit", "C") in ("C", "F")
    assert names == {"weather", "clock"}


def _calls_of_long(call_format: ToolCallFormat, text: str) -> tuple[str, list[tuple[str, Any]]]:
    _, content, calls = parse(PartsOptions(call_format, NAMES), text)
    return content, [(name, json.loads(arguments)) for name, arguments in calls]


@pytest.mark.parametrize("call_format", FORMATS, ids=lambda call_format: call_format.name)
def test_what_templates_are_told_of_a_call_is_what_the_parser_finds(call_format: ToolCallFormat) -> None:
    written = call_format.written("weather", '{"city": "Paris"}')
    assert calls_of(call_format, written) == ("", [("weather", {"city": "Paris"})])


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("{{ '<tool_call>' }}", "hermes"),
        ("{% if tools %}[AVAILABLE_TOOLS]{% endif %}[TOOL_CALLS]", "mistral"),
        ("[TOOL_CALLS]{{ name }}[ARGS]{{ arguments }}", "mistral"),
        ("<|python_tag|>", "llama3_json"),
        ('Environment: ipython {"name": f, "parameters": {}}', "llama3_json"),
        ("[func_name1(params_name1=params_value1)]", "pythonic"),
        ("plain", "hermes"),
    ],
)
def test_the_format_is_detected_from_the_template(template: str, expected: str) -> None:
    tokenizer = Tokenizer(folder_of("byte_level"), template)
    assert tool_call_format("auto", tokenizer).name == expected
    assert tool_call_format("pythonic", tokenizer).name == "pythonic"


@pytest.mark.parametrize("marks", [(), ("[TOOL_CALLS]",), ("[TOOL_CALLS]", "[ARGS]")])
def test_names_before_arguments_are_written_where_the_template_does_so_with_the_models_own_marks(
    marks: tuple[str, ...], tmp_path: Path
) -> None:
    shutil.copytree(folder_of("byte_level"), tmp_path / "model")
    path = tmp_path / "model" / "tokenizer.json"
    described = json.loads(path.read_text())
    rest = {"lstrip": False, "rstrip": False, "normalized": False, "single_word": False, "special": True}
    first = max([*described["model"]["vocab"].values(), *(token["id"] for token in described["added_tokens"])]) + 1
    described["added_tokens"] += [{"id": first + i, "content": mark, **rest} for i, mark in enumerate(marks)]
    path.write_text(json.dumps(described))
    found = tool_call_format("auto", Tokenizer(tmp_path / "model", "[TOOL_CALLS]{{ name }}[ARGS]"))
    assert found.shows_special_tokens is bool(marks)
    assert found.written("f", "{}") == "[TOOL_CALLS]f[ARGS]{}"
    text = found.grammar(FUNCTIONS, is_parallel=True).text
    for number, mark in enumerate(marks):
        assert f"<[{first + number}]>" in text
        assert mark not in text
    assert ('"[TOOL_CALLS]weather' in text) is (not marks)


def test_templates_get_arguments_as_objects_and_those_without_tools_get_text() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "clock", "arguments": '{"zone": "x"}'}}
    messages = [
        {"role": "user", "content": "when?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "noon"},
    ]
    request = ChatRequest.parse({"model": "m", "messages": messages})
    plain = template_messages(request.messages)
    assert plain[1]["tool_calls"][0]["function"]["arguments"] == {"zone": "x"}
    told = told_messages(request.messages, FUNCTIONS, HermesFormat())
    assert [message["role"] for message in told] == ["system", "user", "assistant", "user"]
    assert '"name": "weather"' in told[0]["content"]
    assert told[2]["content"] == HermesFormat().written("clock", '{"zone": "x"}')
    assert "noon" in told[3]["content"]
