"""Grammars without a model: what is compiled, what the matcher allows, what is refused and in what time."""

import json
import re
import time
from collections.abc import Iterator
from contextlib import suppress

import jsonschema
import pytest

from tests.structured.grammar_tools import PATIENT, byte_level, compiler_of, walk
from tests.structured.schemas import HOSTILE, SCHEMAS
from tests.tiny_tokenizers import tokenizer_of
from worker.grammar import matcher as matcher_module
from worker.grammar.checks import GrammarChecks, GrammarLimits
from worker.grammar.compiler import GrammarCompiler
from worker.grammar.errors import GrammarBusyError, GrammarError
from worker.grammar.specs import (
    TaggedJson,
    choice_grammar,
    ebnf_grammar,
    json_object_grammar,
    json_schema_grammar,
    regex_grammar,
    tagged_json_grammar,
)
from worker.grammar.vocabulary import vocabulary_of
from worker.types import GrammarSpec


@pytest.fixture(scope="module")
def compiler() -> Iterator[GrammarCompiler]:
    with compiler_of(byte_level()) as compiler:
        yield compiler


def answers(compiler: GrammarCompiler, spec: GrammarSpec, num: int = 8) -> list[str]:
    texts = [walk(compiler.compile(spec), byte_level(), seed) for seed in range(num)]
    return [text for text in texts if text is not None]


@pytest.mark.parametrize("name", SCHEMAS)
def test_random_answers_follow_their_schema(compiler: GrammarCompiler, name: str) -> None:
    schema, _ = SCHEMAS[name]
    texts = answers(compiler, json_schema_grammar(schema), 4)
    assert texts
    for text in texts:
        jsonschema.validate(json.loads(text), schema)


def test_a_json_object_is_an_object(compiler: GrammarCompiler) -> None:
    assert all(isinstance(json.loads(text), dict) for text in answers(compiler, json_object_grammar()))


def test_a_regular_expression_is_matched_whole(compiler: GrammarCompiler) -> None:
    texts = answers(compiler, regex_grammar(r"[a-c]{2}/(x|yz)\d"))
    assert texts
    assert all(re.fullmatch(r"[a-c]{2}/(x|yz)\d", text) for text in texts)


def test_each_choice_can_be_given_and_nothing_else(compiler: GrammarCompiler) -> None:
    choices = ['say "a/b"', "größe\n", "x"]
    assert set(answers(compiler, choice_grammar(choices), 40)) == set(choices)


@pytest.mark.parametrize("text", ['start: "x" DIGIT\nDIGIT: /[0-9]/', 'root ::= "x" digit\ndigit ::= [0-9]'])
def test_a_grammar_is_written_in_larks_notation_or_in_gbnf(compiler: GrammarCompiler, text: str) -> None:
    texts = answers(compiler, ebnf_grammar(text))
    assert texts
    assert all(re.fullmatch(r"x[0-9]", text) for text in texts)


def test_a_forced_call_is_json_between_its_tags(compiler: GrammarCompiler) -> None:
    schema = {"type": "object", "properties": {"n": {"enum": [1, 2]}}, "required": ["n"], "additionalProperties": False}
    options = [
        TaggedJson(schema, '<call>{"name":"one","arguments":', "}</call>"),
        TaggedJson({"type": "boolean"}, "<two>", "</two>"),
    ]
    names = set()
    for text in answers(compiler, tagged_json_grammar(options), 20):
        if text.startswith("<call>"):
            call = json.loads(text.removeprefix("<call>").removesuffix("</call>"))
            jsonschema.validate(call["arguments"], schema)
            names.add(call["name"])
        else:
            names.add("two")
            assert text in ("<two>true</two>", "<two>false</two>")
    assert names == {"one", "two"}


def test_calls_in_parallel_are_parted(compiler: GrammarCompiler) -> None:
    compiled = compiler.compile(tagged_json_grammar([TaggedJson({"const": 1}, "<", ">")], separator="\n"))
    compiled.matcher(byte_level().encode_piece("<1>\n<1>\n<1>"))
    with pytest.raises(GrammarError):
        compiled.matcher(byte_level().encode_piece("<1><1>"))


def test_a_call_may_begin_with_a_control_token_that_text_cannot_forge(compiler: GrammarCompiler) -> None:
    tokenizer = byte_level()
    control = next(i for i in tokenizer.special_ids if tokenizer.token_bytes(i) == b"<|im_start|>")
    spec = tagged_json_grammar([TaggedJson({"const": 1}, special_token="<|im_start|>")])
    assert compiler.compile(spec).matcher().allowed().nonzero().squeeze(1).tolist() == [control]
    free = compiler.compile(regex_grammar(r"(.|\n)*")).matcher().allowed()
    assert not free[control]


def test_an_end_token_is_allowed_where_the_answer_may_end(compiler: GrammarCompiler) -> None:
    end = byte_level().eos_token_id
    matcher = compiler.compile(regex_grammar("ab?")).matcher()
    assert not matcher.allowed()[end]
    matcher.accept(byte_level().encode_piece("a")[0])
    assert matcher.allowed()[end]
    assert not matcher.has_ended
    matcher.accept(byte_level().encode_piece("b")[0])
    assert matcher.allowed().nonzero().squeeze(1).tolist() == [end]
    assert matcher.has_ended


def test_ignoring_the_end_it_comes_only_where_nothing_else_can(compiler: GrammarCompiler) -> None:
    end = byte_level().eos_token_id
    matcher = compiler.compile(regex_grammar("ab?")).matcher(ignore_eos=True)
    matcher.accept(byte_level().encode_piece("a")[0])
    assert matcher.allowed().nonzero().squeeze(1).tolist() == byte_level().encode_piece("b")
    matcher.accept(byte_level().encode_piece("b")[0])
    assert matcher.allowed().nonzero().squeeze(1).tolist() == [end]


def test_a_matcher_is_built_again_from_the_tokens_so_far(compiler: GrammarCompiler) -> None:
    compiled = compiler.compile(json_schema_grammar(SCHEMAS["nested"][0]))
    token_ids = byte_level().encode_piece('{"user": {"address": {"city": "Li')
    first = compiled.matcher()
    for token_id in token_ids:
        first.accept(token_id)
    assert compiled.matcher(token_ids).allowed().equal(first.allowed())
    with pytest.raises(GrammarError, match="token 1 of the answer"):
        compiled.matcher(byte_level().encode_piece("x"))


def test_byte_tokens_of_sentencepiece_spell_what_they_stand_for() -> None:
    tokenizer = tokenizer_of("sentencepiece_bpe")
    with compiler_of(tokenizer) as compiler:
        texts = {walk(compiler.compile(choice_grammar(["日本", "the cat"])), tokenizer, seed) for seed in range(12)}
    assert texts == {"日本", "the cat"}


def test_a_tokenizer_whose_tokens_are_no_fixed_bytes_is_refused() -> None:
    tokenizer = tokenizer_of("wordpiece")
    with pytest.raises(GrammarError, match="fixed bytes"):
        vocabulary_of(tokenizer, tokenizer.vocab_size, [1])
    with pytest.raises(GrammarError, match="end-of-sequence"):
        vocabulary_of(byte_level(), byte_level().vocab_size, [])


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (regex_grammar("(a"), "unclosed group"),
        (regex_grammar("(?=a)b"), "look-around"),
        (ebnf_grammar("start: missing"), "unknown name"),
        (ebnf_grammar("start: start"), "no text at all"),
        (json_schema_grammar({"type": "array", "uniqueItems": True}), "uniqueItems"),
        (json_schema_grammar({"type": "integer", "minimum": 5, "maximum": 3}), "minimum"),
        (json_schema_grammar({"$ref": "http://localhost/schema.json"}), "fetch"),
        (GrammarSpec("json_schema", "{"), "EOF"),
    ],
)
def test_what_is_wrong_with_a_grammar_is_said(compiler: GrammarCompiler, spec: GrammarSpec, message: str) -> None:
    with pytest.raises(GrammarError, match=message):
        compiler.compile(spec)


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_grammar_takes_no_more_than_its_time_and_the_next_one_is_served(
    compiler: GrammarCompiler, name: str
) -> None:
    # dottxt-ai/outlines#1428
    began_s = time.monotonic()
    with suppress(GrammarError):  # refused or followed: either is harmless
        walk(compiler.compile(GrammarSpec(*HOSTILE[name])), byte_level(), 0, max_tokens=30)
    assert time.monotonic() - began_s < PATIENT.compile_s + 3.0
    assert answers(compiler, choice_grammar([f"after {name}"]), 1) == [f"after {name}"]


def test_a_refused_grammar_is_remembered() -> None:
    slow = GrammarSpec(*HOSTILE["30 patterns at once"])
    with compiler_of(byte_level(), GrammarLimits(compile_s=0.2, wait_s=60.0)) as compiler:
        for _ in range(2):
            began_s = time.monotonic()
            with pytest.raises(GrammarError, match="to compile"):
                compiler.compile(slow)
        assert time.monotonic() - began_s < 0.1


def test_of_many_new_grammars_those_that_wait_too_long_are_told_so() -> None:
    tokenizer = byte_level()
    checks = GrammarChecks(
        lambda: vocabulary_of(tokenizer, tokenizer.vocab_size, [1]), GrammarLimits(compile_s=1.0, wait_s=60.0)
    )
    try:
        checks.submit(regex_grammar("ready")).result()
        kind, text = HOSTILE["30 patterns at once"]
        hostile = checks.submit(GrammarSpec(kind, text))
        checks.limits = GrammarLimits(wait_s=0.1)
        late = checks.submit(regex_grammar("late"))
        with pytest.raises(GrammarBusyError):
            late.result()
        assert isinstance(hostile.exception(), GrammarError)
        assert checks.submit(regex_grammar("ready")).done(), "what is known needs no turn"
    finally:
        checks.close()


def test_the_least_recently_used_grammar_is_forgotten_first() -> None:
    with compiler_of(byte_level(), GrammarLimits(num_cached=2, wait_s=60.0)) as compiler:
        kept, dropped, newest = (regex_grammar(text) for text in ("a", "b", "c"))
        first = compiler.compile(kept)
        compiler.compile(dropped)
        assert compiler.compile(kept) is first
        compiler.compile(newest)
        assert compiler.compile(kept) is first
        assert not compiler.submit(dropped).done()
        assert compiler.submit(newest).done()


def test_masks_that_take_too_long_end_the_answer(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    matcher = compiler.compile(regex_grammar("(a|b){1000}")).matcher()
    matcher.allowed()
    monkeypatch.setattr(matcher_module, "MASK_GRACE_S", -1.0)
    with pytest.raises(GrammarError, match="takes too long"):
        matcher.allowed()
