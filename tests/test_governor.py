"""The governed token budget: running answers meet their target, and prompts still get on."""

from random import Random

import pytest

from scheduler.governor import BudgetGovernor
from scheduler.step_estimate import StepLoad, StepTimeEstimate
from tests.scheduling import Stepper, chunk_sizes
from worker.config import ConfigError, EngineConfig, check_engine_config

TARGET_S = 0.1
BUDGET = 2048


def true_step_s(load: StepLoad, num_prefill_tokens: int) -> float:
    product = num_prefill_tokens * (load.num_prompt_context_tokens + num_prefill_tokens / 2)
    return (
        0.008
        + 4e-4 * num_prefill_tokens
        + 6e-4 * load.num_decodes
        + 1e-7 * load.num_context_tokens
        + 2e-8 * product
    )


def governed_run(noise: float, seed: int, num_steps: int = 3000) -> tuple[list[float], int]:
    """Step times after the first 500 steps, and the prompt tokens that they took."""
    rng = Random(seed)
    governor = BudgetGovernor(TARGET_S, 16, 0)
    context = num_tokens = 0
    durations_s: list[float] = []
    for number in range(num_steps):
        num_decodes = rng.randint(1, 32)
        load = StepLoad(num_decodes, num_decodes * rng.randint(100, 800), context)
        size = governor.max_prefill_tokens(load, BUDGET)
        duration_s = true_step_s(load, size) * rng.lognormvariate(0.0, noise)
        governor.learn(load, size, duration_s)
        context = (context + size) % 4096
        if number >= 500:
            durations_s.append(duration_s)
            num_tokens += size
    return sorted(durations_s), num_tokens


@pytest.mark.parametrize("noise", [0.02, 0.1, 0.3])
@pytest.mark.parametrize("seed", range(3))
def test_the_99th_percentile_of_step_times_comes_within_a_tenth_of_the_target(noise: float, seed: int) -> None:
    durations_s, _ = governed_run(noise, seed)
    assert durations_s[int(0.99 * len(durations_s))] == pytest.approx(TARGET_S, rel=0.1)


def test_little_noise_costs_little_of_what_the_target_allows() -> None:
    durations_s, num_tokens = governed_run(0.02, 0)
    # With the true step time known, each step would last as long as the target.
    assert sum(durations_s) > 0.85 * TARGET_S * len(durations_s)
    assert num_tokens > 0


def test_without_running_answers_a_prompt_gets_the_whole_budget() -> None:
    assert BudgetGovernor(TARGET_S, 16, 0).max_prefill_tokens(StepLoad(0, 0, 0), BUDGET) == BUDGET


def test_a_target_that_cannot_be_met_still_leaves_prompts_their_least_share() -> None:
    governor = BudgetGovernor(1e-6, 16, 24)
    load = StepLoad(4, 400, 0)
    for _ in range(50):
        governor.learn(load, 24, 0.05)
    assert governor.max_prefill_tokens(load, BUDGET) == 24
    assert governor.max_prefill_tokens(load, 10) == 10


def test_one_absurd_measurement_does_not_stop_prompts_for_long() -> None:
    governor = BudgetGovernor(TARGET_S, 16, 0)
    load = StepLoad(8, 1600, 0)
    for size in [16, 64, 128, 160, 96] * 20:
        governor.learn(load, size, true_step_s(load, size))
    before = governor.max_prefill_tokens(load, BUDGET)
    governor.learn(load, before, 60.0)
    assert governor.max_prefill_tokens(load, BUDGET) >= 0.5 * before
    for size in [16, 64, 128, 160, 96] * 20:
        governor.learn(load, size, true_step_s(load, size))
    assert governor.max_prefill_tokens(load, BUDGET) >= 0.9 * before


def test_the_estimate_finds_the_step_time_and_is_never_negative() -> None:
    rng = Random(1)
    estimate = StepTimeEstimate()
    for _ in range(500):
        load = StepLoad(rng.randint(0, 32), rng.randint(0, 20_000), rng.randint(0, 4096))
        size = rng.choice([0, 16, 128, 512])
        estimate.learn(load, size, true_step_s(load, size))
    for load, size in [(StepLoad(8, 2000, 100), 64), (StepLoad(32, 20_000, 0), 512)]:
        assert estimate.predict_s(load, size) == pytest.approx(true_step_s(load, size), rel=0.02)
    assert estimate.predict_s(StepLoad(0, 0, 0), 0) >= 0.0


def test_a_scheduler_with_a_target_cuts_prompts_smaller_beside_running_answers_alone() -> None:
    stepper = Stepper(budget=256, max_model_len=2000, num_blocks=2000, target_itl_ms=40.0, chunk_alignment=4)
    stepper.add("answer", 8, max_tokens=200)
    for _ in range(20):
        stepper.step()
    stepper.add("prompt", 600, max_tokens=1)
    sizes = [chunk_sizes(record).get("prompt", 0) for record in stepper.steps(8)]
    # A step takes 10 ms in the stepper whatever it holds; the first chunk is small all the same, since nothing is
    # known yet of what prompt tokens cost beside answers.
    assert 0 < sizes[0] < 256
    records = stepper.run_to_end()
    assert all(record.num_decodes == 1 for record in records if "answer" in record.decode_request_ids)
    assert not any(record.is_over_target for record in records)


def test_steps_over_the_target_are_marked_in_their_records() -> None:
    stepper = Stepper(target_itl_ms=1.0)
    stepper.add("answer", 8, max_tokens=5)
    records = stepper.steps(3)
    assert [record.is_over_target for record in records] == [False, False, False]
    outputs = stepper.plan()
    stepper.scheduler.update(outputs.step_id, {outputs.chunks[0].seq_id: [5]}, 1000.0)
    assert stepper.scheduler.records.newest.is_over_target


@pytest.mark.parametrize("target", [-1.0, float("inf"), float("nan")])
def test_a_target_that_is_no_time_is_refused(target: float) -> None:
    with pytest.raises(ConfigError, match="target_itl_ms"):
        check_engine_config(EngineConfig(target_itl_ms=target))


def test_the_default_policy_refuses_a_target() -> None:
    with pytest.raises(ConfigError, match="chunked_prefill"):
        check_engine_config(EngineConfig(target_itl_ms=50.0, scheduler_policy="default"))


def test_a_kind_of_step_that_never_was_is_learnt_from():
    """Prompts whose steps take as long as what they read, and nothing else, leave nothing for a step without any."""
    estimate = StepTimeEstimate()
    for number in range(1, 41):
        estimate.learn(StepLoad(0, 0, 64 * number), 64, 1e-6 * 64 * (64 * number + 32))
    assert estimate.predict_s(StepLoad(1, 0, 0), 0) < 1e-9
    for _ in range(40):
        estimate.learn(StepLoad(1, 0, 0), 0, 0.01)
    assert estimate.predict_s(StepLoad(1, 0, 0), 0) == pytest.approx(0.01, rel=0.3)
