"""Faults that people met in schedulers of this kind, each held away. Threads are named where they were reported."""

import pytest

from scheduler import RequestTooLargeError
from tests.integer_oracle.player import Player, check_answers
from tests.integer_oracle.scenario import Arrival, Scenario
from tests.scheduling import Stepper, chunk_sizes
from worker.config import ConfigError, EngineConfig, check_engine_config

POLICIES = pytest.mark.parametrize("policy", ["default", "chunked_prefill"])
MODES = pytest.mark.parametrize("mode", ["recompute", "swap"])


@pytest.mark.parametrize("alignment", [64, 127, 128, 129, 256, 4096])
@pytest.mark.parametrize("prompt", [127, 128, 129, 255, 256, 257])
def test_an_alignment_beyond_the_budget_never_starves_a_prompt(alignment: int, prompt: int) -> None:
    # sgl-project/sglang#36344
    stepper = Stepper(budget=128, max_model_len=300, chunk_alignment=alignment)
    stepper.add("prompt", prompt, max_tokens=1)
    records = stepper.run_to_end(max_steps=6)
    assert sum(chunk_sizes(record)["prompt"] for record in records) == prompt


@pytest.mark.parametrize("prompt", [2047, 2048, 2049, 4096, 4097])
def test_a_prompt_over_the_token_budget_runs_in_chunks_within_it(prompt: int) -> None:
    # sgl-project/sglang-jax#1551
    stepper = Stepper(budget=2048, max_model_len=8192, block_size=16)
    stepper.add("prompt", prompt, max_tokens=1)
    records = stepper.run_to_end(max_steps=3)
    assert max(record.num_batched_tokens for record in records) <= 2048


def test_without_chunks_a_budget_below_the_context_is_refused_at_start_so_no_prompt_waits_for_ever() -> None:
    # tenstorrent/vllm#436
    with pytest.raises(ValueError, match="max_num_batched_tokens"):
        Stepper(policy="default", budget=256, max_model_len=1024)


@POLICIES
def test_a_prompt_larger_than_the_pool_is_refused_and_the_next_is_served(policy: str) -> None:
    # vllm-project/vllm#1607
    stepper = Stepper(policy=policy, budget=256, max_model_len=256, block_size=16, num_blocks=8)
    with pytest.raises(RequestTooLargeError, match="200 tokens needs 13 cache blocks for 1 sequence; there are 8"):
        stepper.add("large", 200)
    stepper.add("small", 5, max_tokens=3)
    stepper.run_to_end(max_steps=3)
    assert stepper.num_output_tokens("small") == 3


@POLICIES
def test_nothing_new_is_admitted_while_older_groups_sit_swapped(policy: str) -> None:
    # vllm-project/vllm#5578
    stepper = Stepper(policy=policy, mode="swap", num_blocks=20, num_host_blocks=60, max_num_seqs=12)
    most_swapped = 0
    for number in range(60):
        stepper.add(f"r{number}", 3 + number % 7, max_tokens=16)
        swapped = set(stepper.swapped)
        record = stepper.step()
        assert not (record.admitted and swapped & set(stepper.swapped))
        most_swapped = max(most_swapped, record.num_swapped)
    assert most_swapped >= 2
    last = stepper.run_to_end()[-1]
    assert (last.num_swapped, last.num_host_blocks_used) == (0, 0)


@POLICIES
def test_a_large_prompt_that_waits_for_blocks_keeps_its_place_among_steady_small_arrivals(policy: str) -> None:
    # vllm-project/vllm#33522
    stepper = Stepper(policy=policy, num_blocks=12)
    admitted: list[str] = []
    for number in range(60):
        stepper.add("large" if number == 3 else f"small{number}", 40 if number == 3 else 4, max_tokens=6)
        admitted += stepper.step().admitted
    expected = [f"small{number}" for number in range(60)]
    expected[3] = "large"
    assert "large" in admitted
    assert admitted == expected[: len(admitted)]


def test_without_a_threshold_a_newcomer_waits_only_for_the_prompts_before_it() -> None:
    # vllm-project/vllm#53130. The bound: the tokens of the prompts that came first over the budget, plus one step.
    stepper = Stepper(budget=64, max_model_len=4096, num_blocks=4000, max_num_seqs=8)
    for number in range(3):
        stepper.add(f"before{number}", 2000, max_tokens=1)
    stepper.add("newcomer", 5, max_tokens=1)
    for number in range(4):
        stepper.add(f"after{number}", 2000, max_tokens=1)
    num_steps = 0
    while "newcomer" not in stepper.ends:
        stepper.step()
        num_steps += 1
    assert num_steps <= 3 * 2000 // 64 + 1


def test_with_a_threshold_a_short_newcomer_starts_at_once_whatever_long_prompts_came_first() -> None:
    # vllm-project/vllm#53130, as an operator who serves long prompts sets it up.
    stepper = Stepper(budget=64, max_model_len=4096, num_blocks=12000, max_num_seqs=16, long_prefill_threshold=512)
    for number in range(20):
        stepper.add(f"long{number}", 2000, max_tokens=1)
    waited: list[int] = []
    for number in range(40):
        stepper.steps(3)
        request_id = f"newcomer{number}"
        stepper.add(request_id, 5, max_tokens=1)
        num_steps = 0
        while request_id not in stepper.ends:
            stepper.step()
            num_steps += 1
        waited.append(num_steps)
    assert max(waited) == 1


@POLICIES
@MODES
@pytest.mark.parametrize("block_size", [1, 4, 16])
def test_one_request_that_exhausts_the_pool_ends_with_length_and_the_next_is_served(
    policy: str, mode: str, block_size: int
) -> None:
    # sgl-project/sglang#19881
    num_blocks = 32 // block_size
    stepper = Stepper(policy=policy, mode=mode, num_blocks=num_blocks, num_host_blocks=99, block_size=block_size)
    stepper.add("alone", 20)
    stepper.add("next", 6, max_tokens=2)
    stepper.run_to_end(max_steps=60)
    assert stepper.ends["alone"].finish_reason == "length"
    assert stepper.num_output_tokens("alone") == 33 - 20
    assert stepper.num_output_tokens("next") == 2


SIZE_OPTIONS = ["max_model_len", "max_num_batched_tokens", "max_num_seqs", "block_size", "chunk_alignment"]


@pytest.mark.parametrize("option", SIZE_OPTIONS)
@pytest.mark.parametrize("value", [0, -5])
def test_sizes_that_are_zero_or_negative_are_refused_at_start_by_name(option: str, value: int) -> None:
    # vllm-project/vllm#43532
    with pytest.raises(ConfigError) as refused:
        check_engine_config(EngineConfig(model="demo", **{option: value}))
    assert refused.value.option == option


@POLICIES
@MODES
def test_answers_under_pressure_are_complete_and_equal_to_those_of_an_ample_pool(policy: str, mode: str) -> None:
    # vllm-project/vllm#16832, vllm-project/vllm#5349: 40 requests of 64 tokens in a pool for 10.
    config = Stepper(policy=policy, mode=mode, budget=160, max_num_seqs=40, max_model_len=160).scheduler.config
    arrivals = [Arrival(0, f"r{n}", [n % 40, 1 + n % 7, 3], 64, has_stop_token=False) for n in range(40)]
    small = Scenario(config, 4, 171, 200, arrivals)
    played = Player(small).play()
    check_answers(small, played)
    assert played.num_recomputes + played.num_swaps >= 10
    assert {len(output) for output in played.outputs.values()} == {64}


@pytest.mark.parametrize("cap", [0, 1, 2])
def test_many_prompts_just_over_the_chunk_all_finish_and_their_tails_pack(cap: int) -> None:
    # sgl-project/sglang#2255
    stepper = Stepper(budget=64, max_model_len=128, num_blocks=6000, max_num_seqs=64, max_num_partial_prefills=cap)
    for number in range(200):
        stepper.add(f"r{number}", 64 + 16, max_tokens=1)
    records = stepper.run_to_end()
    assert len(stepper.ends) == 200
    assert len(records) == 200 * 80 // 64
    assert {record.num_batched_tokens for record in records} == {64}


@POLICIES
@MODES
def test_a_pool_at_its_brim_gives_no_endless_empty_steps(policy: str, mode: str) -> None:
    # vllm-project/vllm#15996
    stepper = Stepper(policy=policy, mode=mode, num_blocks=20, num_host_blocks=30, max_num_seqs=16, watermark=0.05)
    for number in range(60):
        stepper.add(f"r{number}", 1 + number * 7 % 40, max_tokens=8 + number % 9)
    records = stepper.run_to_end()
    assert all(record.num_batched_tokens for record in records if not record.ended)
    assert sum(bool(record.preemptions) for record in records) >= 5
    assert {end.finish_reason for end in stepper.ends.values()} == {"length"}


@POLICIES
@MODES
def test_many_sequences_that_cross_a_block_border_in_one_step_are_counted_in_blocks(policy: str, mode: str) -> None:
    # sgl-project/sglang#4602: 148 blocks of 64 are wanted at once, and thousands of free tokens are no free blocks.
    stepper = Stepper(
        policy=policy,
        mode=mode,
        budget=148 * 64,
        max_num_seqs=148,
        max_model_len=256,
        block_size=64,
        num_blocks=148 + 50,
        num_host_blocks=200,
    )
    for number in range(148):
        stepper.add(f"r{number}", 64, max_tokens=3)
    stepper.step()
    assert stepper.blocks.num_free_device_blocks == 50
    crossing = stepper.step()
    # Each victim's block and the 50 free ones serve the older ones.
    assert crossing.num_decodes == 99
    assert len(crossing.preemptions) == 49
    stepper.run_to_end()
    assert [stepper.num_output_tokens(f"r{number}") for number in range(148)] == [3] * 148


@POLICIES
def test_an_answer_that_never_stops_ends_at_the_context(policy: str) -> None:
    # ggml-org/llama.cpp#6638
    stepper = Stepper(policy=policy, max_model_len=64)
    stepper.add("endless", 10, max_tokens=10**9)
    stepper.run_to_end(max_steps=60)
    assert stepper.ends["endless"].finish_reason == "length"
    assert stepper.num_output_tokens("endless") == 54


def test_aborts_at_every_moment_leave_nothing_and_may_be_repeated() -> None:
    # vllm-project/vllm#6586
    for moment in range(12):
        stepper = Stepper(mode="swap", budget=24, num_blocks=9, num_host_blocks=9)
        for number in range(4):
            stepper.add(f"r{number}", 11, max_tokens=10)
        in_flight = []
        for _ in range(moment):
            in_flight.append(stepper.plan())
            if len(in_flight) == 2 or in_flight[-1].is_empty:
                in_flight = [planned for planned in in_flight if not planned.is_empty]
                if in_flight:
                    stepper.settle(in_flight.pop(0))
        for number in range(4):
            stepper.abort(f"r{number}")
            assert stepper.scheduler.abort(f"r{number}") == []
            assert stepper.scheduler.finish(f"r{number}", 0) == []
        for planned in in_flight:
            if not planned.is_empty:
                stepper.settle(planned)
        assert stepper.run_to_end() == []
        stepper.add("next", 5, max_tokens=2)
        stepper.run_to_end(max_steps=2)


@pytest.mark.parametrize("request_id", ["queued", "unknown"])
def test_an_abort_of_a_request_without_blocks_is_clean(request_id: str) -> None:
    # vllm-project/vllm#18485
    stepper = Stepper(max_num_seqs=1)
    stepper.add("running", 5, max_tokens=4)
    stepper.add("queued", 5, max_tokens=4)
    stepper.step()
    stepper.abort(request_id)
    stepper.run_to_end()
    assert stepper.num_output_tokens("running") == 4
    assert ("queued" in stepper.waiting) is False
