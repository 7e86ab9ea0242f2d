"""What preemptions, late arrivals and cancels must not change: penalties, the length of answers, others' tokens."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from tests.oracle.compare import compare_answers
from tests.oracle.conftest import OracleModel, Tally
from tests.oracle.engine_runs import greedy, run_engine, run_on
from tests.oracle.prompts import tiny_prompts
from tests.oracle.reference import ReferenceAnswer
from worker.config import EngineConfig
from worker.engine import Engine
from worker.types import SamplingParams

pytestmark = pytest.mark.oracle

ModelOf = Callable[[str], OracleModel]
BLOCK_SIZE = 16
AMPLE_BLOCKS = 400
MODES = ["recompute", "swap"]


def _config(folder: Path) -> EngineConfig:
    return EngineConfig(
        model=str(folder),
        dtype="float32",
        device="cpu",
        max_model_len=384,
        max_num_batched_tokens=64,
        block_size=BLOCK_SIZE,
        num_device_blocks=AMPLE_BLOCKS,
    )


def _tight(config: EngineConfig, mode: str, num_device_blocks: int, max_model_len: int) -> EngineConfig:
    return replace(
        config,
        preemption_mode=mode,
        num_device_blocks=num_device_blocks,
        num_host_blocks=AMPLE_BLOCKS if mode == "swap" else None,
        max_model_len=max_model_len,
    )


@pytest.mark.parametrize(
    "penalty",
    [{"presence_penalty": 1.5}, {"repetition_penalty": 1.3}, {"frequency_penalty": 0.5}],
    ids=lambda penalty: next(iter(penalty)),
)
def test_penalties_see_the_same_tokens_after_a_recompute(
    penalty: dict[str, float], tiny_model: ModelOf, tally: Tally
) -> None:
    model = tiny_model("llama")
    prompts = tiny_prompts([20] * 8)
    params = SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True, **penalty)
    expected = [model.answer(prompt, params) for prompt in prompts]
    plain = [model.answer(prompt, greedy(40)) for prompt in prompts]
    assert sum(a.token_ids != b.token_ids for a, b in zip(expected, plain, strict=True)) > len(prompts) // 2
    run = run_engine(_tight(_config(model.folder), "recompute", 15, 64), prompts, [params] * len(prompts))
    tally.add(f"llama, recompute with {next(iter(penalty))}", compare_answers(expected, run.answers), run.totals)
    assert run.totals.num_preemptions_recompute > 0
    # Mid-decode: a victim had output when it lost its cache.
    assert any(chunk.end > 20 for record in run.records for chunk in record.prefill_chunks)


@pytest.mark.parametrize("mode", MODES)
def test_forty_answers_in_a_pool_for_ten_are_complete(mode: str, tiny_model: ModelOf, tally: Tally) -> None:
    model, num_tokens, prompt_length = tiny_model("qwen3"), 64, 16
    prompts, params = tiny_prompts([prompt_length] * 40), [greedy(num_tokens)] * 40
    expected = [model.answer(prompt, params[0]) for prompt in prompts]
    config = _config(model.folder)
    ample = run_engine(config, prompts, params)
    tally.add("qwen3, forty in an ample pool", compare_answers(expected, ample.answers), ample.totals)
    assert ample.totals.num_preemptions_recompute == 0
    pool_for_ten = 10 * (prompt_length + num_tokens) // BLOCK_SIZE + 1
    run = run_engine(_tight(config, mode, pool_for_ten, prompt_length + num_tokens), prompts, params)
    tally.add(f"qwen3, forty in a pool for ten, {mode}", compare_answers(expected, run.answers), run.totals)
    assert [len(answer) for answer in run.answers] == [num_tokens] * 40
    assert run.finish_reasons == ["length"] * 40
    num_by_mode = {"recompute": run.totals.num_preemptions_recompute, "swap": run.totals.num_preemptions_swap}
    assert num_by_mode.pop(mode) > 10
    assert list(num_by_mode.values()) == [0]


def test_short_answers_keep_their_tokens_when_a_long_prompt_comes_and_one_is_cancelled(
    tiny_model: ModelOf, tally: Tally
) -> None:
    model = tiny_model("mistral")
    prompts, params = tiny_prompts([6, 9, 14, 20, 300]), [greedy(48)] * 5
    expected = [model.answer(prompt, params[0]) for prompt in prompts]
    # One engine for all rounds, so that blocks come back with what others left in them.
    engine = Engine(_config(model.folder))
    for round_number in range(10):
        arrivals = [0, round_number % 3, 1, 2, 3 + round_number]
        cancelled, cancel_step = round_number % 4, 6 + 2 * round_number
        run = run_on(engine, prompts, params, arrival_steps=arrivals, abort_steps={cancelled: cancel_step})
        assert run.finish_reasons == ["abort" if place == cancelled else "length" for place in range(5)]
        cut = len(run.answers[cancelled])
        assert 0 < cut < 48
        had = ReferenceAnswer(expected[cancelled].token_ids[:cut], expected[cancelled].margins[:cut])
        same = [had if place == cancelled else answer for place, answer in enumerate(expected)]
        tally.add(f"mistral, late long prompt, round {round_number}", compare_answers(same, run.answers), run.totals)
