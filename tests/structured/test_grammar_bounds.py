"""How long the texts may be that a grammar holds an answer to, and short walks that meet what the bounds cannot see."""

from collections.abc import Iterator

import pytest

from tests.structured.grammar_tools import byte_level, compiler_of, walk
from worker.grammar.bounds import MAX_FIXED_BYTES, check_bounds, fixed_bytes
from worker.grammar.compiler import GrammarCompiler
from worker.grammar.errors import GrammarError
from worker.grammar.specs import (
    TaggedJson,
    choice_grammar,
    ebnf_grammar,
    json_schema_grammar,
    regex_grammar,
    tagged_json_grammar,
)
from worker.types import GrammarSpec


@pytest.fixture(scope="module")
def compiler() -> Iterator[GrammarCompiler]:
    with compiler_of(byte_level()) as compiler:
        yield compiler


@pytest.mark.parametrize(
    ("regex", "size"),
    [
        ("", 0),
        ("^abc$", 3),
        ("größe", 7),
        ("w{60000}", 60000),
        ("w{6,60000}", 6),
        ("w{0,60000}", 1),
        ("(ab){3}c", 7),
        ("(?:ab|cdef){3}", 12),
        ("((a{10}){10}){10}", 1000),
        ("(w{50})?", 50),
        (r"[a-z\]]{5}\p{Lu}{3}\x{41}\{", 10),
        (r"(?i)(?P<name>x{4})", 4),
        ("{9}(]", 1),
        ("(a", 1),
    ],
)
def test_a_regular_expression_is_measured(regex: str, size: int) -> None:
    assert fixed_bytes(regex) == size


def test_repeats_without_end_do_not_make_numbers_without_end() -> None:
    assert fixed_bytes("a" + "{999999}" * 5000) == 10**12


def with_a(schema: dict[str, object]) -> GrammarSpec:
    return json_schema_grammar({"type": "object", "properties": {"a": schema}})


@pytest.mark.parametrize(
    ("spec", "place"),
    [
        (with_a({"type": "string", "pattern": "^w{60000}$"}), "properties.a.pattern: it asks for 60000"),
        (with_a({"anyOf": [{}, {"type": "string", "pattern": "(ab{99}){999}"}]}), r"properties\.a\.anyOf\.1\.pattern"),
        (with_a({"type": "object", "patternProperties": {"^k{60000}$": {}}}), "patternProperties"),
        (with_a({"const": "c" * 20_000}), "properties.a.const"),
        (with_a({"enum": ["a", "ö" * 3000]}), "properties.a.enum.1: it asks for 6000"),
        (with_a({"type": "string", "minLength": 20_000}), "properties.a.minLength"),
        (with_a({"type": "array", "minItems": 1e300}), "properties.a.minItems"),
        (json_schema_grammar({"required": [], "properties": {"k" * 20_000: {}}}), "properties.k"),
        (regex_grammar("b{100000}"), "it asks for 100000"),
        (choice_grammar(["a", "b" * 20_000]), "1: it asks for 20000"),
        (ebnf_grammar('start: "x"\n  | "b"{60000}'), "line 2: it asks for 60000"),
        (ebnf_grammar('start: "ab"~6000'), "line 1: it asks for 12000"),
        (ebnf_grammar("start: /w{60000}/"), "line 1"),
        (ebnf_grammar('root ::= ["a] "b"{60000}'), "line 1"),
        (
            tagged_json_grammar([TaggedJson({"type": "string", "pattern": "^d{40000}$"}, "<", ">")]),
            r"line 3: pattern: it asks for 40000",
        ),
    ],
)
def test_too_long_a_text_is_refused_by_its_place(compiler: GrammarCompiler, spec: GrammarSpec, place: str) -> None:
    with pytest.raises(GrammarError, match=f"{place}.*at most {MAX_FIXED_BYTES}"):
        compiler.compile(spec)


@pytest.mark.parametrize(
    "spec",
    [
        with_a({"type": "string", "maxLength": 1_000_000, "description": "long " * 10_000}),
        with_a({"type": "string", "pattern": "^[a-z ]{1,65536}$"}),
        with_a({"type": "array", "minItems": 3, "maxItems": 10**9, "const": None}),
        ebnf_grammar('start: "b{60000}" /[/{]{2}/ # {70000}\n'),
        ebnf_grammar('root ::= [{6] "0000}"'),
        GrammarSpec("json_schema", "{"),
        GrammarSpec("json_schema", "[" * 100_000),
        GrammarSpec("json_object", ""),
    ],
)
def test_what_only_may_be_long_is_left_alone(spec: GrammarSpec) -> None:
    check_bounds(spec)


def test_texts_as_long_as_they_may_be_are_followed(compiler: GrammarCompiler) -> None:
    assert walk(compiler.compile(regex_grammar(f"w{{{MAX_FIXED_BYTES}}}")), byte_level(), 0, 100) is None
    spec = with_a({"type": "string", "pattern": f"^w{{{MAX_FIXED_BYTES}}}$"})
    compiler.compile(spec).matcher(byte_level().encode_piece('{"a": "wwww')).allowed()


def test_what_is_too_long_in_ways_that_the_bounds_do_not_see_is_met_by_a_walk(compiler: GrammarCompiler) -> None:
    rules = "\n".join(f"R{number}: R{number + 1} R{number + 1}" for number in range(20))
    with pytest.raises(GrammarError):
        compiler.compile(ebnf_grammar(f'start: "x" R0\n{rules}\nR20: "b"\n'))
