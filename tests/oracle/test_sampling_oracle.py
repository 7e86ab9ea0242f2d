"""A seeded request samples the same tokens alone, in company and after preemptions, and they are those of a plain
loop: Transformers' logits and the sampler's scores."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from tests.oracle.compare import compare_answers
from tests.oracle.conftest import OracleModel, Tally
from tests.oracle.engine_runs import EngineRun, run_engine, run_on
from tests.oracle.prompts import tiny_prompts
from worker.config import EngineConfig
from worker.engine import Engine
from worker.types import SamplingParams

pytestmark = pytest.mark.oracle

NUM_REQUESTS = 16
NUM_TOKENS = 32
BLOCK_SIZE = 16
MAX_MODEL_LEN = 96
#: The batch fits into the first; the second holds a few of its sequences.
AMPLE_BLOCKS, TIGHT_BLOCKS = 100, 14
TINY_LENGTHS = (40, 7, 63, 16, 33, 20, 5, 52, 12, 31, 9, 25, 48, 15, 17, 64)
PARAMS = [
    SamplingParams(max_tokens=NUM_TOKENS, temperature=1.0, seed=seed, ignore_eos=True) for seed in range(NUM_REQUESTS)
]


def _config(folder: Path) -> EngineConfig:
    return EngineConfig(
        model=str(folder),
        dtype="float32",
        device="cpu",
        max_model_len=MAX_MODEL_LEN,
        max_num_batched_tokens=128,
        block_size=BLOCK_SIZE,
        num_device_blocks=AMPLE_BLOCKS,
        chunk_alignment=1,
    )


def _check_all_ways(
    model: OracleModel, prompts: list[list[int]], config: EngineConfig, name: str, tally: Tally
) -> None:
    alone = _run_alone(Engine(config), prompts)
    expected = [
        model.answer(prompt, params, guess=answer)
        for prompt, params, answer in zip(prompts, PARAMS, alone.answers, strict=True)
    ]

    def check(way: str, run: EngineRun) -> None:
        tally.add(f"{name} sampled, {way}", compare_answers(expected, run.answers), run.totals)

    check("alone", alone)
    batch = run_engine(config, prompts, PARAMS)
    check(f"batch of {NUM_REQUESTS}", batch)
    assert max(record.num_decodes for record in batch.records) == NUM_REQUESTS
    tight = replace(config, num_device_blocks=TIGHT_BLOCKS, preemption_mode="recompute")
    recompute = run_engine(tight, prompts, PARAMS)
    check("recompute", recompute)
    assert recompute.totals.num_preemptions_recompute >= NUM_REQUESTS // 4
    swap = run_engine(replace(tight, preemption_mode="swap", num_host_blocks=AMPLE_BLOCKS), prompts, PARAMS)
    check("swap", swap)
    assert swap.totals.num_preemptions_swap >= NUM_REQUESTS // 4
    assert swap.totals.num_preemptions_recompute == 0


def _run_alone(engine: Engine, prompts: list[list[int]]) -> EngineRun:
    runs = [run_on(engine, [prompt], [params]) for prompt, params in zip(prompts, PARAMS, strict=True)]
    return EngineRun([run.answers[0] for run in runs], [run.finish_reasons[0] for run in runs], engine.totals)


def test_a_seeded_request_samples_the_same_tokens_in_any_company(
    tiny_model: Callable[[str], OracleModel], tally: Tally
) -> None:
    model = tiny_model("llama")
    _check_all_ways(model, tiny_prompts(TINY_LENGTHS), _config(model.folder), "llama", tally)


@pytest.mark.slow
@pytest.mark.model
@pytest.mark.timeout(900)
def test_a_seeded_real_prompt_samples_the_same_tokens_in_any_company(
    demo_model: OracleModel, demo_prompts: list[list[int]], tally: Tally
) -> None:
    prompts = [prompt for prompt in demo_prompts if len(prompt) + NUM_TOKENS <= MAX_MODEL_LEN][:NUM_REQUESTS]
    _check_all_ways(demo_model, prompts, _config(demo_model.folder), "demo", tally)


def test_seeds_matter(tiny_model: Callable[[str], OracleModel]) -> None:
    model, prompt = tiny_model("llama"), tiny_prompts(TINY_LENGTHS)[0]
    assert len({tuple(model.answer(prompt, params).token_ids) for params in PARAMS[:4]}) == 4
