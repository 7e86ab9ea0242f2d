"""Grammars in the real engine on a tiny model: whole answers, groups, preemption, resumption, one request's failure."""

import re
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.group_runs import Run
from tests.oracle.prompts import tiny_prompts
from tests.steppable_engine import Mailbox
from tests.tiny_models import save_tiny_model
from tests.tiny_tokenizer import save_tiny_tokenizer
from worker.config import EngineConfig
from worker.engine import Engine
from worker.engine_loop import EngineLoop
from worker.grammar.errors import GrammarError
from worker.grammar.specs import json_object_grammar, regex_grammar
from worker.request_checks import RequestError
from worker.text import Tokenizer
from worker.types import BeamParams, EngineRequest, GrammarSpec, SamplingParams

pytestmark = pytest.mark.usefixtures("one_thread")

EOS = 2
PATTERN = r"[a-f]{10,30}(-[0-9]{3,12}){2}"
FORM = SamplingParams(max_tokens=70, n=2, temperature=1.0, seed=5, grammar=regex_grammar(PATTERN))


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> EngineConfig:
    folder = save_tiny_tokenizer(save_tiny_model(tmp_path_factory.mktemp("tiny"), "llama"))
    return EngineConfig(
        model=str(folder),
        dtype="float32",
        device="cpu",
        max_model_len=128,
        max_num_batched_tokens=48,
        block_size=8,
        num_device_blocks=200,
        chunk_alignment=1,
    )


@pytest.fixture(scope="module")
def tokenizer(config: EngineConfig) -> Tokenizer:
    return Tokenizer(Path(config.model))


@pytest.fixture(scope="module")
def engine(config: EngineConfig) -> Iterator[Engine]:
    engine = Engine(config)
    yield engine
    engine.close()


def requests_of(params: SamplingParams, num: int = 4) -> list[EngineRequest]:
    prompts = tiny_prompts([13, 40, 8, 29])[:num]
    return [EngineRequest(str(place), prompt, params) for place, prompt in enumerate(prompts)]


@pytest.fixture(scope="module")
def undisturbed(engine: Engine) -> dict[tuple[str, int], list[int]]:
    return Run(engine, requests_of(FORM)).answers


def text_of(tokenizer: Tokenizer, answer: list[int]) -> str:
    assert answer[-1] == EOS
    return tokenizer.decode(answer[:-1])


def test_every_answer_follows_the_grammar_and_stops_by_itself(
    engine: Engine, tokenizer: Tokenizer, undisturbed: dict[tuple[str, int], list[int]]
) -> None:
    texts = [text_of(tokenizer, answer) for answer in undisturbed.values()]
    assert all(re.fullmatch(PATTERN, text) for text in texts), texts
    assert len(set(texts)) == len(texts)
    run = Run(engine, requests_of(replace(FORM, temperature=0.0, n=1)))
    assert set(run.reasons.values()) == {"stop"}
    assert all(re.fullmatch(PATTERN, text_of(tokenizer, answer)) for answer in run.answers.values())


@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_preemption_changes_no_answer(
    config: EngineConfig, undisturbed: dict[tuple[str, int], list[int]], mode: str
) -> None:
    engine = Engine(replace(config, num_device_blocks=30, num_host_blocks=60, preemption_mode=mode))
    assert Run(engine, requests_of(FORM)).answers == undisturbed
    assert engine.totals.num_preemptions_recompute + engine.totals.num_preemptions_swap > 0
    engine.close()


def test_a_resumed_answer_goes_on_where_its_grammar_stood(
    config: EngineConfig, undisturbed: dict[tuple[str, int], list[int]]
) -> None:
    engine = Engine(config)
    known = {key: answer[: 9 + 8 * key[1]] for key, answer in undisturbed.items()}
    requests = [
        replace(request, output_token_ids=[known[request.request_id, index] for index in range(2)])
        for request in requests_of(FORM)
    ]
    answers = Run(engine, requests).answers
    assert {key: known[key] + answer for key, answer in answers.items()} == undisturbed
    engine.close()


def test_output_that_does_not_follow_the_grammar_cannot_be_resumed(engine: Engine) -> None:
    request = replace(requests_of(FORM, 1)[0], output_token_ids=[[5], [5]])
    with pytest.raises(RequestError, match="grammar: token 1"):
        engine.add_request(request, 0.0)
    assert not engine.has_unfinished()


def test_an_answer_cut_by_its_limit_is_a_beginning(engine: Engine, tokenizer: Tokenizer) -> None:
    run = Run(engine, requests_of(replace(FORM, max_tokens=4)))
    assert set(run.reasons.values()) == {"length"}
    assert all(re.fullmatch("[a-f]{4}", tokenizer.decode(answer)) for answer in run.answers.values())


def test_an_answer_ends_with_its_grammar_whatever_its_least_length_and_without_eos(
    engine: Engine, tokenizer: Tokenizer
) -> None:
    short = replace(FORM, grammar=regex_grammar("ab?"), min_tokens=30)
    for params in (short, replace(short, min_tokens=0, ignore_eos=True)):
        run = Run(engine, requests_of(params))
        assert set(run.reasons.values()) == {"stop"}
        assert {text_of(tokenizer, answer) for answer in run.answers.values()} == {"ab"}


def test_a_bad_grammar_and_one_beside_beams_are_refused(engine: Engine) -> None:
    (request,) = requests_of(replace(FORM, grammar=regex_grammar("(a")), 1)
    with pytest.raises(RequestError, match="grammar: unclosed group"):
        engine.add_request(request, 0.0)
    (request,) = requests_of(SamplingParams(8, grammar=json_object_grammar(), beam=BeamParams(2)), 1)
    with pytest.raises(RequestError, match="grammar: not together with a beam search"):
        engine.add_request(request, 0.0)


@pytest.mark.parametrize("verb", ["allowed", "accept"])
def test_a_grammar_that_becomes_too_costly_ends_its_request_alone(
    engine: Engine, undisturbed: dict[tuple[str, int], list[int]], verb: str
) -> None:
    requests = requests_of(FORM)

    def fail(*_: object) -> None:
        raise GrammarError("enough")

    def hook(step: int, run: Run) -> None:
        if step == 8:
            matcher = engine._open["1"].matchers[1]
            monkeypatch.setattr(matcher, verb, fail)

    with pytest.MonkeyPatch.context() as monkeypatch:
        run = Run(engine, requests, hook)
    assert {key for key, reason in run.reasons.items() if reason == "error"} == {("1", 0), ("1", 1)}
    assert {key: answer for key, answer in run.answers.items() if key[0] != "1"} == {
        key: answer for key, answer in undisturbed.items() if key[0] != "1"
    }


# --- in the engine's loop


def test_a_request_that_waits_for_its_grammar_holds_up_nobody(config: EngineConfig) -> None:
    engine = Engine(config)
    held = threading.Event()
    load_vocabulary = engine.grammars._vocabulary

    def slow_vocabulary() -> object:
        assert held.wait(30.0)
        return load_vocabulary()

    engine.grammars._compiler._load_vocabulary = slow_vocabulary
    mailbox = Mailbox()
    loop = EngineLoop(engine, mailbox.deliver, lambda error: None)
    loop.start()
    try:
        form, aborted, plain, wrong = requests_of(replace(FORM, n=1))
        loop.submit(form)
        loop.submit(replace(aborted, request_id="aborted"))
        loop.submit(replace(plain, params=SamplingParams(max_tokens=5, ignore_eos=True)))
        assert mailbox.wait_for_end(plain.request_id).finish_reason == "length"
        assert loop.status().load.num_waiting == 2, "what waits for its grammar is seen to wait"
        loop.abort("aborted")
        assert mailbox.wait_for_end("aborted").finish_reason == "abort"
        held.set()
        assert mailbox.wait_for_end(form.request_id).finish_reason == "stop"
        loop.submit(replace(wrong, params=replace(FORM, n=1, grammar=GrammarSpec("regex", "(a"))))
        end = mailbox.wait_for_end(wrong.request_id)
        assert (end.error, end.is_refusal) == ("grammar: unclosed group", True)
    finally:
        held.set()
        loop.stop(10.0)
        engine.close()
