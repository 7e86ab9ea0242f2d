"""A pool under pressure does its work once, not again and again: what is computed twice, and who is thrown out how
often. Without the prefix cache, which would hide it."""

from functools import cache
from random import Random

import pytest

from scheduler.records import StepRecord
from tests.scheduling import Stepper, victims

MODES = pytest.mark.parametrize("mode", ["recompute", "swap", "auto"])
BLOCK_SIZE = 16
BUDGET = 256


@pytest.mark.parametrize("order", ["fcfs", "priority", "fair"])
@pytest.mark.parametrize("policy", ["default", "chunked_prefill"])
def test_two_prompts_of_six_tenths_of_the_pool_are_prefilled_at_most_twice(policy: str, order: str) -> None:
    num_blocks = 100
    num_prompt_tokens = num_blocks * BLOCK_SIZE * 6 // 10
    stepper = Stepper(
        policy=policy,
        order=order,
        budget=2000 if policy == "default" else BUDGET,
        max_model_len=2000,
        block_size=BLOCK_SIZE,
        num_blocks=num_blocks,
        watermark=0.01,
    )
    for name in ("first", "second"):
        stepper.add(name, num_prompt_tokens, max_tokens=400, tenant=name)
    records = stepper.run_to_end()
    num_prefilled = sum(record.num_prefill_tokens for record in records)
    assert num_prefilled <= 2 * 2 * num_prompt_tokens
    assert {stepper.num_output_tokens(name) for name in ("first", "second")} == {400}


@pytest.mark.parametrize("num_prompts", [2, 3, 5])
def test_prompts_that_outgrow_the_pool_together_take_turns_with_little_computed_twice(num_prompts: int) -> None:
    """Each holds 0.4 of the pool when it comes and 0.6 when it ends."""
    stepper = Stepper(budget=BUDGET, max_model_len=2000, block_size=BLOCK_SIZE, num_blocks=100, watermark=0.01)
    for number in range(num_prompts):
        stepper.add(f"r{number}", 640, max_tokens=320)
    records = stepper.run_to_end()
    assert sum(record.num_prefill_tokens for record in records) <= 2 * num_prompts * 640


def requests(seed: int) -> list[tuple[int, int, int]]:
    """200 times (step of arrival, prompt tokens, output tokens); lengths are log-normal, as in real traffic."""
    rng = Random(seed)
    step = 0.0
    made = []
    for _ in range(200):
        step += rng.expovariate(0.5)
        num_prompt, num_output = (min(400, 1 + int(rng.lognormvariate(4.3, 0.9))) for _ in range(2))
        made.append((int(step), num_prompt, num_output))
    return made


def serve(
    trace: list[tuple[int, int, int]], num_blocks: int, mode: str, order: str = "fcfs"
) -> tuple[Stepper, list[StepRecord]]:
    stepper = Stepper(
        mode=mode,
        order=order,
        budget=BUDGET,
        max_num_seqs=64,
        max_model_len=1000,
        block_size=BLOCK_SIZE,
        num_blocks=num_blocks,
        num_host_blocks=num_blocks,
        watermark=0.01,
    )
    records: list[StepRecord] = []
    for number, (step, num_prompt, num_output) in enumerate(trace):
        while len(records) < step:
            records.append(stepper.step())
        stepper.add(
            f"r{number}",
            [number] * num_prompt,
            num_output,
            tenant="ab"[number % 2],
            priority=number % 3,
            n=3 if number % 10 == 0 else 1,
        )
    return stepper, records + stepper.run_to_end()


@cache
def ample_run(seed: int) -> tuple[int, int]:
    """Most blocks that were in use at a time in an ample pool, and steps."""
    _, records = serve(requests(seed), 1500, "recompute")
    return max(record.num_device_blocks_used for record in records), len(records)


@MODES
@pytest.mark.parametrize("order", ["fcfs", "fair"])
@pytest.mark.parametrize("seed", [1, 2])
def test_nobody_is_preempted_more_than_3_times_where_requests_want_twice_the_pool(
    mode: str, order: str, seed: int
) -> None:
    most_wanted, num_steps = ample_run(seed)
    stepper, records = serve(requests(seed), most_wanted // 2, mode, order=order)
    assert sum(len(victims(record)) for record in records) > 20
    assert max(group.num_preemptions for group in stepper.groups.values()) <= 3
    # What is computed again is a small part of the work, and nobody is kept out for long beside free blocks.
    num_tokens = sum(record.num_batched_tokens for record in records)
    assert sum(p.num_discarded_tokens for record in records for p in record.preemptions) <= 0.25 * num_tokens
    assert len(records) <= 1.45 * num_steps


@MODES
def test_under_priority_low_classes_pay_for_urgent_ones_and_still_not_again_and_again(mode: str) -> None:
    most_wanted, _ = ample_run(1)
    stepper, records = serve(requests(1), most_wanted // 2, mode, order="priority")
    assert sum(len(victims(record)) for record in records) > 20
    assert max(group.num_preemptions for group in stepper.groups.values()) <= 5


@MODES
@pytest.mark.parametrize(("num_preemptions", "num_free_blocks_wanted"), [(1, 3), (2, 3 + 1), (3, 3 + 2)])
def test_who_was_thrown_out_often_comes_back_only_with_room_for_the_others_to_grow(
    mode: str, num_preemptions: int, num_free_blocks_wanted: int
) -> None:
    stepper = Stepper(mode=mode, num_blocks=7, num_host_blocks=20)
    for name in ("old", "other", "victim"):
        stepper.add(name, 7)
    stepper.step()
    stepper.groups["victim"].num_preemptions = num_preemptions - 1
    stepper.steps(2)
    assert stepper.running == ["old", "other"]
    assert stepper.num_output_tokens("victim") == 2
    stepper.finish("old")
    assert stepper.blocks.num_free_device_blocks == 4
    assert (stepper.step().resumed == ["victim"]) == (num_free_blocks_wanted <= 4)
    # Where nobody else runs, it needs room for nobody else.
    stepper.finish("other")
    stepper.step()
    assert "victim" in stepper.running
