"""A request for which the model computes no numbers ends with an error; the engine and its batch mates go on."""

from dataclasses import replace

import pytest
import torch

from scheduler import ScheduledChunk, SchedulerOutputs
from tests.oracle.prompts import tiny_prompts
from tests.tiny_models import save_tiny_model
from worker.config import EngineConfig
from worker.engine import NO_NUMBERS, Engine
from worker.model_runner import PreparedStep
from worker.pending_tokens import DeviceTokens
from worker.types import BeamParams, EngineRequest, SamplingParams, TokenEvent

pytestmark = pytest.mark.usefixtures("one_thread")

GREEDY = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
SAMPLED = replace(GREEDY, temperature=1.0, seed=3)
KINDS = {
    "greedy": GREEDY,
    "logprobs": replace(GREEDY, logprobs=2),
    "sampled": SAMPLED,
    "cut": replace(SAMPLED, top_p=0.9, top_k=40, min_p=0.01),
    "penalized": replace(GREEDY, repetition_penalty=1.2),
    "several": replace(SAMPLED, n=3),
    "beams": SamplingParams(max_tokens=8, n=2, beam=BeamParams(3)),
    "scored": replace(GREEDY, prompt_logprobs=1),
}


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> EngineConfig:
    return EngineConfig(
        model=str(save_tiny_model(tmp_path_factory.mktemp("tiny"), "llama")),
        dtype="float32",
        device="cpu",
        max_model_len=192,
        max_num_batched_tokens=64,
        num_device_blocks=60,
    )


class FaultyRunner:
    """Runs the model, and puts `value` in place of some of the logits of one request from its `after`-th row on."""

    def __init__(self, engine: Engine, value: float, *, whole: bool, after: int = 0) -> None:
        self._runner = engine._runner
        self._value = value
        self._columns = slice(None) if whole else slice(7, 8)
        self._num_rows_left = after

    def prepare(self, outputs: SchedulerOutputs) -> tuple[PreparedStep | None, list[ScheduledChunk]]:
        return self._runner.prepare(outputs), [chunk for chunk in outputs.chunks if chunk.do_sample]

    def run(
        self, step: tuple[PreparedStep | None, list[ScheduledChunk]], before: DeviceTokens | None
    ) -> torch.Tensor:
        prepared, sampling = step
        logits = self._runner.run(prepared, before).clone()
        rows = [row for row, chunk in enumerate(sampling) if chunk.request_id == "broken"]
        if rows and self._num_rows_left == 0:
            logits[rows[-1], self._columns] = self._value
        elif rows:
            self._num_rows_left -= 1
        return logits

    def logits_of(self, places: list[int]) -> torch.Tensor:
        return self._runner.logits_of(places)


def answers(engine: Engine, requests: list[EngineRequest]) -> dict[str, list[TokenEvent]]:
    events: dict[str, list[TokenEvent]] = {request.request_id: [] for request in requests}
    for request in requests:
        engine.add_request(request, 0.0)
    while engine.has_unfinished():
        for event in engine.step(0.0):
            events[event.request_id].append(event)
    engine.check_integrity()
    return events


def tokens(events: list[TokenEvent]) -> list[tuple[int, list[int]]]:
    return [(event.index, event.token_ids) for event in events]


@pytest.mark.parametrize("after", [0, 3])
@pytest.mark.parametrize(("value", "whole"), [(float("nan"), True), (float("nan"), False), (float("-inf"), True)])
@pytest.mark.parametrize("kind", KINDS)
def test_only_the_request_without_numbers_ends(
    config: EngineConfig, kind: str, value: float, whole: bool, after: int
) -> None:
    mates = [
        EngineRequest("greedy", tiny_prompts([30])[0], replace(GREEDY, logprobs=1)),
        EngineRequest("sampled", tiny_prompts([21])[0], replace(SAMPLED, n=2)),
    ]
    expected = answers(Engine(config), mates)
    engine = Engine(config)
    runner = engine._runner
    engine._runner = FaultyRunner(engine, value, whole=whole, after=after)
    params = KINDS[kind]
    events = answers(engine, [EngineRequest("broken", tiny_prompts([17])[0], params), *mates])
    assert [tokens(events[mate.request_id]) for mate in mates] == [tokens(expected[mate.request_id]) for mate in mates]
    ends = [event for event in events["broken"] if event.finish_reason is not None]
    assert sorted(event.index for event in ends) == list(range(params.n))
    assert {(event.finish_reason, event.error, event.is_refusal) for event in ends} == {("error", NO_NUMBERS, False)}
    assert max(len(event.token_ids) for event in events["broken"]) <= 1
    # The same engine serves on, the same request too.
    engine._runner = runner
    assert tokens(answers(engine, [replace(mates[0], request_id="next")])["next"]) == tokens(expected["greedy"])


def test_numbers_that_were_none_in_the_cache_reach_nobody_else(config: EngineConfig) -> None:
    # NaN keys and values stay in the blocks of a request that has ended; whoever gets the blocks must not see them.
    engine = Engine(replace(config, num_device_blocks=13, enable_prefix_caching=False))
    request = EngineRequest("a", tiny_prompts([90])[0], GREEDY)
    expected = tokens(answers(engine, [request])["a"])
    with torch.inference_mode():
        for layer in range(engine._tensor_pool.num_layers):
            for cache in engine._tensor_pool.key_value(layer):
                cache[1:].fill_(float("nan"))  # all but the null block, which nobody owns
    assert tokens(answers(engine, [request])["a"]) == expected


def test_a_prompt_whose_scores_are_no_numbers_ends_its_request(config: EngineConfig) -> None:
    engine = Engine(config)
    logits_of = engine._runner.logits_of

    def broken(places: list[int]) -> torch.Tensor:
        logits = logits_of(places).clone()
        logits[0, 3] = float("nan")
        return logits

    engine._runner.logits_of = broken
    events = answers(engine, [EngineRequest("a", tiny_prompts([150])[0], replace(GREEDY, prompt_logprobs=1))])
    assert [(event.finish_reason, event.error, event.token_ids) for event in events["a"]] == [("error", NO_NUMBERS, [])]
