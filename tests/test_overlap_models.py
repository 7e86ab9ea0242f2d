"""Planning ahead on a tiny model, at once and on a late device: every answer is the one without it."""

from collections.abc import Iterator
from dataclasses import replace
from random import Random
from typing import Any

import pytest
import torch

from scheduler import PENDING_TOKEN_ID, ScheduledChunk, SchedulerOutputs
from tests.group_runs import Run
from tests.late_device import make_late
from tests.oracle.prompts import tiny_prompts
from tests.steppable_engine import Mailbox
from tests.tiny_models import save_tiny_model
from tests.tiny_tokenizer import save_tiny_tokenizer
from worker.config import EngineConfig
from worker.engine import NO_NUMBERS, Engine
from worker.engine_loop import EngineLoop
from worker.grammar.specs import regex_grammar
from worker.types import BeamParams, EngineRequest, SamplingParams, TokenEvent

pytestmark = pytest.mark.usefixtures("one_thread")

GREEDY = SamplingParams(max_tokens=20, temperature=0.0, ignore_eos=True)
SAMPLED = replace(GREEDY, temperature=1.0, seed=7)
KINDS = {
    "greedy": GREEDY,
    "seeded": SAMPLED,
    "cut": replace(SAMPLED, top_p=0.9, top_k=40),
    "ends": replace(SAMPLED, ignore_eos=False, stop_token_ids=tuple(range(3, 120))),
    "short": replace(SAMPLED, max_tokens=1),
    "prompt alone": replace(GREEDY, max_tokens=0),
    "several": replace(SAMPLED, n=3),
    "penalties": replace(SAMPLED, presence_penalty=1.5, frequency_penalty=0.5, repetition_penalty=1.3),
    "bias and least length": replace(SAMPLED, logit_bias=((9, 4.0),), min_tokens=8, stop_token_ids=(9, 10, 11)),
    "log-probabilities": replace(SAMPLED, logprobs=3),
    "of the prompt": replace(GREEDY, prompt_logprobs=2),
    "beams": SamplingParams(max_tokens=12, n=2, beam=BeamParams(3)),
    "grammar": replace(SAMPLED, ignore_eos=False, n=2, grammar=regex_grammar(r"[a-f]{4,9}(-[0-9]{3,5}){2}")),
}
PROMPTS = tiny_prompts([13, 40, 16, 8, 29, 5, 60, 11, 23, 37, 19, 30, 9])


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> EngineConfig:
    return EngineConfig(
        model=str(save_tiny_tokenizer(save_tiny_model(tmp_path_factory.mktemp("tiny"), "llama"))),
        dtype="float32",
        device="cpu",
        max_model_len=96,
        max_num_batched_tokens=48,
        block_size=8,
        num_device_blocks=200,
        chunk_alignment=1,
    )


def requests() -> list[EngineRequest]:
    return [EngineRequest(kind, prompt, KINDS[kind]) for kind, prompt in zip(KINDS, PROMPTS, strict=True)]


class Told(Run):
    """What was told besides the tokens, in its order."""

    def __init__(self, engine: Engine, **options: Any) -> None:
        self.logprobs: dict[str, list[Any]] = {kind: [] for kind in KINDS}
        super().__init__(engine, requests(), **options)

    def _take(self, event: TokenEvent) -> None:
        super()._take(event)
        self.logprobs[event.request_id] += [*(event.logprobs or ()), *(event.prompt_logprobs or ())]


@pytest.fixture(scope="module")
def plain(config: EngineConfig) -> Iterator[Told]:
    engine = Engine(config)
    yield Told(engine)
    engine.close()


def assert_same(run: Told, plain: Told) -> None:
    assert run.answers == plain.answers
    assert run.reasons == plain.reasons
    for kind, told in run.logprobs.items():
        assert [len(entry) for entry in told] == [len(entry) for entry in plain.logprobs[kind]]
        flat, expected = [], []
        for ours, theirs in zip(told, plain.logprobs[kind], strict=True):
            assert [token_id for token_id, _ in ours[-1]] == [token_id for token_id, _ in theirs[-1]]
            flat += [ours[0], *(value for _, value in ours[-1])]
            expected += [theirs[0], *(value for _, value in theirs[-1])]
        assert flat == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize("is_late", [False, True])
@pytest.mark.parametrize(("mode", "num_blocks"), [("auto", 200), ("swap", 26), ("recompute", 26)])
def test_every_kind_of_request_gets_the_same_answer(
    config: EngineConfig, plain: Told, mode: str, num_blocks: int, is_late: bool
) -> None:
    engine = Engine(
        replace(
            config, async_scheduling=True, preemption_mode=mode, num_device_blocks=num_blocks, num_host_blocks=60
        )
    )
    device = make_late(engine, Random(num_blocks)) if is_late else None
    try:
        run = Told(engine)
    finally:
        engine.close()
    assert_same(run, plain)
    num_preemptions = engine.totals.num_preemptions_recompute + engine.totals.num_preemptions_swap
    assert (num_preemptions > 0) == (num_blocks == 26)
    if device is not None:
        assert device.max_behind > 1
        assert device.num_copies <= device.num_passes


def test_one_memory_for_two_steps_would_show(config: EngineConfig, plain: Told) -> None:
    engine = Engine(replace(config, async_scheduling=True))
    # As if the batch were prepared in the memory that the step before is still read from.
    for buffer in vars(engine._runner._batch).values():
        if hasattr(buffer, "_hosts"):
            buffer._hosts, buffer._arrays = buffer._hosts[:1], buffer._arrays[:1]
    device = make_late(engine, Random(0))
    device.only_when_waited_for()
    try:
        with pytest.raises(AssertionError):
            assert_same(Told(engine), plain)
    finally:
        engine.close()


def test_a_request_whose_numbers_break_ends_alone_though_its_next_step_runs(
    config: EngineConfig, plain: Told
) -> None:
    engine = Engine(replace(config, async_scheduling=True))
    prepare, run = engine._runner.prepare, engine._runner.run
    broken: list[int] = []
    num_rows_left = 3

    def preparing(outputs: SchedulerOutputs) -> Any:
        sampling = [chunk for chunk in outputs.chunks if chunk.do_sample]
        broken[:] = [row for row, chunk in enumerate(sampling) if chunk.request_id == "greedy"]
        return prepare(outputs)

    def running(*arguments: Any) -> torch.Tensor:
        nonlocal num_rows_left
        logits = run(*arguments)
        for row in broken:
            num_rows_left -= 1
            if num_rows_left <= 0:
                logits = logits.clone()
                logits[row] = float("nan")
        return logits

    engine._runner.prepare, engine._runner.run = preparing, running
    told = Told(engine)
    engine.close()
    assert told.errors == {"greedy": NO_NUMBERS}
    assert told.answers["greedy", 0] == plain.answers["greedy", 0][:2]
    for key, answer in told.answers.items():
        assert key[0] == "greedy" or answer == plain.answers[key]


def test_an_id_that_comes_again_while_its_last_step_runs_is_another_request(config: EngineConfig) -> None:
    engine = Engine(replace(config, async_scheduling=True))
    prompts = tiny_prompts([20, 24])
    expected = Run(Engine(config), [EngineRequest("x", prompts[1], GREEDY)]).answers["x", 0]
    engine.add_request(EngineRequest("x", prompts[0], GREEDY), 0.0)
    for _ in range(4):
        engine.step(0.0)
    engine.abort("x")
    engine.add_request(EngineRequest("x", prompts[1], GREEDY), 0.0)
    events: list[TokenEvent] = []
    while engine.has_unfinished():
        events += engine.step(0.0)
    assert [event.finish_reason for event in events if event.finish_reason] == ["abort", "length"]
    assert [token_id for event in events for token_id in event.token_ids] == expected
    engine.check_integrity()


def test_the_loop_delivers_every_token_of_steps_that_overlap(config: EngineConfig, plain: Told) -> None:
    mailbox, deaths = Mailbox(), []
    loop = EngineLoop(Engine(replace(config, async_scheduling=True)), mailbox.deliver, deaths.append)
    loop.start()
    kinds = ("greedy", "seeded", "cut", "ends", "short", "penalties")
    for request in requests():
        if request.request_id in kinds:
            loop.submit(request)
    loop.submit(EngineRequest("leaves", PROMPTS[1], GREEDY))
    mailbox.wait_for_tokens("leaves", 2)
    loop.abort("leaves")
    for kind in kinds:
        mailbox.wait_for_end(kind)
        assert mailbox.tokens(kind) == plain.answers[kind, 0]
    assert mailbox.wait_for_end("leaves").finish_reason in ("abort", "length")
    loop.stop(10.0)
    assert not deaths


def test_a_token_that_is_not_known_is_never_embedded(config: EngineConfig) -> None:
    engine = Engine(config)
    chunk = ScheduledChunk("a", 0, 5, [PENDING_TOKEN_ID], [1], False, True)
    with pytest.raises(AssertionError, match="not known yet"):
        engine._runner.execute(SchedulerOutputs(1, [chunk]))
