"""Nobody waits without bound: each test states the number of steps after which the one that waits has its turn."""

import pytest

from tests.scheduling import Stepper, chunk_sizes

ORDERS = pytest.mark.parametrize("order", ["fcfs", "priority", "fair"])


@ORDERS
def test_a_short_newcomer_among_back_to_back_prompts_of_2000_starts_once_those_before_it_are_computed(
    order: str,
) -> None:
    """Bound: the tokens of the prompts that were there before it, over the budget, plus one step."""
    # vllm-project/vllm#53130
    stepper = Stepper(order=order, budget=64, max_model_len=4096, num_blocks=6000, max_num_seqs=8)
    for number in range(4):
        stepper.add(f"before{number}", 2000, max_tokens=4)
    stepper.steps(10)
    stepper.add("newcomer", 5, max_tokens=1)
    bound = (4 * 2000 - 10 * 64) // 60 + 1  # at most 4 answers take a token of the budget each
    num_steps = 0
    while "newcomer" not in stepper.ends:
        if num_steps % 30 == 0:
            stepper.add(f"after{num_steps}", 2000, max_tokens=4)
        stepper.step()
        num_steps += 1
        assert num_steps <= bound


@ORDERS
def test_with_a_threshold_a_short_newcomer_among_back_to_back_prompts_of_2000_starts_in_one_step(order: str) -> None:
    """Bound: 1 step, however many long prompts came before it."""
    stepper = Stepper(
        order=order, budget=64, max_model_len=4096, num_blocks=9000, max_num_seqs=16, long_prefill_threshold=512
    )
    for number in range(200):
        if number % 20 == 0:
            stepper.add(f"long{number}", 2000, max_tokens=1)
        if number % 10 == 5:
            stepper.add(f"newcomer{number}", 5, max_tokens=1)
        stepper.step()
        assert f"newcomer{number}" in stepper.ends or number % 10 != 5


@ORDERS
@pytest.mark.parametrize("min_prefill_tokens", [1, 16])
def test_a_prompt_behind_a_wall_of_decodes_gets_at_least_min_prefill_tokens_in_every_step(
    order: str, min_prefill_tokens: int
) -> None:
    """Bound: prompt tokens / min_prefill_tokens steps, with all other sequence slots taken by answers."""
    stepper = Stepper(
        order=order,
        budget=47 + min_prefill_tokens + 1,
        max_num_seqs=48,
        min_prefill_tokens=min_prefill_tokens,
        max_model_len=400,
        num_blocks=5000,
    )
    for number in range(47):
        stepper.add(f"answer{number}", 1, max_tokens=350)
    stepper.step()
    stepper.add("prompt", 160, max_tokens=1)
    num_steps = 0
    while "prompt" not in stepper.ends:
        record = stepper.step()
        num_steps += 1
        assert record.num_decodes == 47
        assert chunk_sizes(record)["prompt"] >= min_prefill_tokens or "prompt" in stepper.ends
    assert num_steps <= 160 // min_prefill_tokens


def test_long_prompts_in_a_stream_of_short_ones_that_takes_the_whole_budget_all_finish() -> None:
    """Bound: a long prompt has a whole budget's turn at least once in 9 steps, so 8 of them take 9 times as long
    as they would alone."""
    stepper = Stepper(budget=64, max_model_len=2048, num_blocks=2600, max_num_seqs=32, long_prefill_threshold=256)
    for number in range(8):
        stepper.add(f"long{number}", 1024, max_tokens=1)
    bound = 9 * (8 * 1024 // 64)
    num_steps = 0
    while not all(f"long{number}" in stepper.ends for number in range(8)):
        stepper.add(f"short{num_steps}", 64, max_tokens=1)
        stepper.step()
        num_steps += 1
        assert num_steps <= bound
    # And the short ones did have the other 8 of 9 steps.
    assert sum(name.startswith("short") for name in stepper.ends) >= num_steps * 0.85


def test_short_prompts_behind_8_long_ones_start_at_once_with_a_threshold() -> None:
    """Bound: 1 step while the short ones leave budget over."""
    stepper = Stepper(budget=64, max_model_len=2048, num_blocks=2600, max_num_seqs=32, long_prefill_threshold=256)
    for number in range(8):
        stepper.add(f"long{number}", 1024, max_tokens=1)
    for number in range(130):
        stepper.add(f"short{number}", 20, max_tokens=1)
        stepper.step()
        assert f"short{number}" in stepper.ends
    stepper.run_to_end(max_steps=8 * 1024 // 44)


def test_short_prompts_behind_8_long_ones_without_a_threshold_wait_for_no_more_than_those() -> None:
    """Bound: the long prompts' tokens over the budget, plus one step."""
    stepper = Stepper(budget=64, max_model_len=2048, num_blocks=2600, max_num_seqs=32)
    for number in range(8):
        stepper.add(f"long{number}", 1024, max_tokens=1)
    stepper.add("short", 5, max_tokens=1)
    num_steps = 0
    while "short" not in stepper.ends:
        stepper.step()
        num_steps += 1
    assert num_steps <= 8 * 1024 // 64 + 1


@pytest.mark.parametrize("long_prefill_threshold", [0, 1000])
def test_a_swapped_answer_beside_a_prompt_of_100000_that_is_midway_goes_on_as_soon_as_it_has_blocks(
    long_prefill_threshold: int,
) -> None:
    """Bound: one step after the blocks are there, although the prompt could take the whole budget of 1,000 more."""
    stepper = Stepper(
        mode="swap",
        budget=100,
        max_model_len=120_000,
        block_size=64,
        num_blocks=1563 + 2,
        num_host_blocks=10,
        chunk_alignment=32,
        long_prefill_threshold=long_prefill_threshold,
    )
    stepper.add("old", 30, max_tokens=60)
    stepper.add("prompt", 100_000, max_tokens=1)
    stepper.step()
    stepper.add("answer", 20, max_tokens=100)
    while not stepper.swapped:
        stepper.step()
    assert stepper.swapped == ["answer"]
    while "old" not in stepper.ends:
        stepper.step()
    assert stepper.swapped == ["answer"]
    record = stepper.step()
    assert record.resumed == ["answer"]
    assert record.decode_request_ids == ["answer"]
    assert "prompt" in chunk_sizes(record)
    while "answer" not in stepper.ends:
        record = stepper.step()
        assert "prompt" not in stepper.ends
        assert record.decode_request_ids == ["answer"]


@ORDERS
def test_everybody_starts_under_steady_arrivals_at_the_limit_of_the_pool(order: str) -> None:
    """Bound: 40 requests, each of at most 20 steps, of which at least 3 run at a time: 300 steps."""
    stepper = Stepper(order=order, mode="swap", num_blocks=24, num_host_blocks=24, priority_aging_s=0.2)
    admitted: set[str] = set()
    for number in range(40):
        stepper.add(
            f"r{number}", 1 + number * 7 % 20, max_tokens=12, priority=number % 3, tenant=f"tenant{number % 3}"
        )
        admitted |= set(stepper.step().admitted)
    records = stepper.run_to_end(max_steps=300)
    assert len(admitted | {name for record in records for name in record.admitted}) == 40
