"""A grammar that asks too much of the library while answers are under way: who meets it ends, and nobody else.

The trial would refuse some of these; it is left out, as for what it cannot see. The library's limit on states is far
below its usual one: what happens there is the same, and soon.
"""

from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path

import pytest

from tests.group_runs import Run
from tests.oracle.prompts import tiny_prompts
from tests.structured.grammar_tools import byte_level, compiler_of, walk
from tests.tiny_models import save_tiny_model
from tests.tiny_tokenizer import save_tiny_tokenizer
from worker.config import EngineConfig
from worker.engine import Engine
from worker.grammar import library, starts
from worker.grammar.checks import GrammarChecks
from worker.grammar.compiler import CompiledGrammar, GrammarCompiler
from worker.grammar.errors import GrammarError
from worker.grammar.specs import ebnf_grammar, regex_grammar
from worker.text import Tokenizer
from worker.types import EngineRequest, GrammarSpec, SamplingParams

pytestmark = pytest.mark.usefixtures("one_thread")


MAX_LEXER_STATES = 1000
#: "b" leads to text that takes more states
TWO_WAYS = ebnf_grammar('start: "r" /[r-z]{100,300}/ | "b" BIG\nBIG: "b"{3000}\n')
RED, BLUE = "rstu", "bbbb"
TOO_MUCH = "more states, or more forced text"


def untried(checks: GrammarChecks, spec: GrammarSpec) -> Future[str]:
    found: Future[str] = Future()
    found.set_result(library.library_grammar(spec))
    return found


@pytest.fixture(autouse=True)
def few_states_and_no_trial(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(GrammarChecks, "submit", untried)
    monkeypatch.setattr(library, "MAX_LEXER_STATES", MAX_LEXER_STATES)


@pytest.fixture
def compiler() -> Iterator[GrammarCompiler]:
    with compiler_of(byte_level()) as compiler:
        yield compiler


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_tokenizer(save_tiny_model(tmp_path_factory.mktemp("tiny"), "llama"))


@pytest.fixture(scope="module")
def engine(folder: Path) -> Iterator[Engine]:
    engine = Engine(
        EngineConfig(
            model=str(folder),
            dtype="float32",
            device="cpu",
            max_model_len=128,
            max_num_batched_tokens=48,
            block_size=8,
            num_device_blocks=200,
            chunk_alignment=1,
        )
    )
    yield engine
    engine.close()


def ids_of(text: str) -> list[int]:
    return byte_level().encode_piece(text)


def follow(compiled: CompiledGrammar, text: str) -> None:
    """As an answer comes to be: a mask before each token."""
    matcher = compiled.matcher()
    for token_id in ids_of(text):
        assert matcher.allowed()[token_id]
        matcher.accept(token_id)


def asking_for(letter: str, folder: Path, request_id: str, max_tokens: int = 60) -> EngineRequest:
    """Whose answer takes the way that begins with this letter."""
    tokenizer = Tokenizer(folder)
    with_letter = [i for i in range(tokenizer.vocab_size) if letter.encode() in tokenizer.token_bytes(i)]
    params = SamplingParams(
        max_tokens,
        temperature=1.0,
        seed=3,
        grammar=TWO_WAYS,
        logit_bias=tuple((token_id, 50.0) for token_id in with_letter),
    )
    return EngineRequest(request_id, tiny_prompts([13])[0], params)


def test_one_who_asks_too_much_ends_alone_and_the_grammar_goes_on_being_served(
    engine: Engine, folder: Path
) -> None:
    requests = [asking_for("r", folder, "red"), replace(asking_for("r", folder, "other"), cache_salt="other")]
    undisturbed = Run(engine, requests).answers
    for _ in range(2):
        run = Run(engine, [*requests, asking_for("b", folder, "blue", 100)], arrival_steps=[0, 0, 8])
        assert run.errors.keys() == {"blue"}
        assert TOO_MUCH in run.errors["blue"]
        assert {key: answer for key, answer in run.answers.items() if key[0] != "blue"} == undisturbed
        assert {run.reasons[key] for key in undisturbed} == {"length"}
    assert Run(engine, requests).answers == undisturbed


def test_answers_under_way_go_on_where_they_stood(compiler: GrammarCompiler) -> None:
    compiled = compiler.compile(TWO_WAYS)
    red, same = compiled.matcher(ids_of(RED)), compiled.matcher(ids_of(RED))
    expected = red.allowed()
    with pytest.raises(GrammarError, match=TOO_MUCH):
        follow(compiled, BLUE)
    assert red.allowed().equal(expected)
    for token_id in ids_of("vwx"):
        same.accept(token_id)
    assert same.allowed().equal(compiled.matcher(ids_of(RED + "vwx")).allowed())
    assert compiler.compile(TWO_WAYS) is compiled


def test_an_end_that_follows_another_ones_failure_is_taken(compiler: GrammarCompiler) -> None:
    end = byte_level().eos_token_id
    assert end is not None
    compiled = compiler.compile(ebnf_grammar('start: "x" | "y" BIG\nBIG: "b"{3000}\n'))
    ending = compiled.matcher(ids_of("x"))
    assert ending.allowed()[end]
    with pytest.raises(GrammarError, match=TOO_MUCH):
        follow(compiled, "ybb")
    ending.accept(end)
    assert ending.has_ended


def test_what_many_answers_have_asked_together_ends_none_of_them(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled = compiler.compile(regex_grammar("[ab ]*a[ab ]{12}b[ab ]{40}"))
    renewed = []
    renew = starts.GrammarStarts.renew
    monkeypatch.setattr(starts.GrammarStarts, "renew", lambda self, root: renewed.append(root) or renew(self, root))
    for seed in range(40):
        walk(compiled, byte_level(), seed, max_tokens=60)
    assert renewed, "the lexer they share has never been full"


def test_one_that_takes_long_to_compile_is_not_compiled_beside_answers_but_for_the_next_request(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(starts, "MAX_RENEWAL_S", 0.0)
    compiled = compiler.compile(TWO_WAYS)
    with pytest.raises(GrammarError, match="too long to compile anew"):
        follow(compiled, BLUE)
    later = compiler.compile(TWO_WAYS)
    assert later is not compiled
    assert later.matcher(ids_of(RED)).allowed().any()
