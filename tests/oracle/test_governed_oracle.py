"""A governed budget cuts prompts elsewhere and changes no token: governor on, off, and a plain loop agree."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from tests.oracle.compare import compare_answers
from tests.oracle.configurations import Configuration, Workload
from tests.oracle.conftest import OracleModel, Tally
from tests.oracle.engine_runs import EngineRun, greedy, run_on
from tests.oracle.prompts import tiny_prompts
from worker.config import EngineConfig
from worker.engine import Engine
from worker.types import SamplingParams

pytestmark = pytest.mark.oracle

LENGTHS = (5, 240, 17, 64, 300, 129, 33, 250, 63, 97)
NUM_TOKENS = 32
BUDGET = 96
TARGET_MS = 30.0
MAX_MODEL_LEN = 336
GREEDY = greedy(NUM_TOKENS)
SAMPLED = SamplingParams(max_tokens=NUM_TOKENS, temperature=1.0, seed=7, ignore_eos=True)


class PricedClock:
    """Every step takes 10 ms and 1 ms for each prompt token, as far as the scheduler can tell."""

    def __init__(self) -> None:
        self.engine: Engine | None = None

    def __call__(self) -> float:
        if self.engine is None or not self.engine.scheduler.records:
            return 0.0
        record = self.engine.scheduler.records.newest
        return record.time_s + 0.010 + 0.001 * record.num_prefill_tokens


def _run(config: EngineConfig, prompts: list[list[int]], params: list[SamplingParams]) -> EngineRun:
    """Prompts come in while earlier ones are answered: without running answers nothing is governed."""
    clock = PricedClock()
    engine = Engine(config, clock)
    clock.engine = engine
    return run_on(engine, prompts, params, arrival_steps=[3 * place for place in range(len(prompts))])


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen3"])
def test_the_tokens_are_the_same_with_the_governor_on_and_off(
    family: str, tiny_model: Callable[[str], OracleModel], tally: Tally
) -> None:
    model = tiny_model(family)
    workload = Workload(LENGTHS, NUM_TOKENS, 16, MAX_MODEL_LEN)
    prompts = tiny_prompts(LENGTHS)
    params = [SAMPLED if place % 3 == 2 else GREEDY for place in range(len(prompts))]
    expected = [model.answer(prompt, sampling) for prompt, sampling in zip(prompts, params, strict=True)]
    config = Configuration("", BUDGET, 8).engine_config(str(model.folder), workload)

    off = _run(config, prompts, params)
    on = _run(replace(config, target_itl_ms=TARGET_MS), prompts, params)

    tally.add(f"{family}, governor off", compare_answers(expected, off.answers), off.totals)
    tally.add(f"{family}, governor on", compare_answers(expected, on.answers), on.totals)
    beside_answers = [record for record in on.records if record.num_decodes and record.prefill_chunks]
    assert any(record.num_prefill_tokens < BUDGET - record.num_decodes for record in beside_answers)
    assert on.totals.num_prefill_chunks > off.totals.num_prefill_chunks + len(prompts)
    assert not any(record.is_over_target for record in off.records)
