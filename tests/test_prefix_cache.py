"""The prefix cache: what is found, for whom, how it is counted, and what happens to it when blocks run short."""

from random import Random

import pytest

from kv_cache import BlockManager, TableRequest
from tests.block_managing import manager
from tests.integer_oracle.player import Player, check_answers
from tests.integer_oracle.scenario import Arrival, Scenario
from tests.scheduling import Stepper, block_keys, chunk_sizes, victims

POLICIES = pytest.mark.parametrize("policy", ["default", "chunked_prefill"])


def cached(num_blocks: int, prompts: dict[int, list[int]]) -> BlockManager:
    """`prompts` by sequence id, computed, published and freed one after the other."""
    blocks = manager(num_blocks)
    for seq_id, prompt in prompts.items():
        keys = block_keys(prompt, 4)
        assert blocks.allocate([TableRequest(seq_id, len(prompt), keys)]) is not None
        blocks.publish(seq_id, 0, keys)
        blocks.free(seq_id)
    return blocks


def request(seq_id: int, prompt: list[int], salt: str = "") -> TableRequest:
    return TableRequest(seq_id, len(prompt), block_keys(prompt, 4, salt))


A = [1] * 12
B = [2] * 12


def test_blocks_of_the_same_beginning_are_found_and_of_another_one_are_not() -> None:
    blocks = cached(20, {1: A})
    assert blocks.allocate([request(2, [*A[:8], 9, 9, 9, 9, 9])]) == [8]
    assert blocks.allocate([request(3, [9, *A[1:]])]) == [0]
    assert blocks.allocate([request(4, [9] * 4 + A[:8])]) == [0]
    assert (blocks.prefix_counts.num_queried_blocks, blocks.prefix_counts.num_hit_blocks) == (3 * 4, 2)


@pytest.mark.parametrize("num_tokens", [1, 4, 5, 8, 11, 12])
def test_at_least_one_token_of_a_prompt_that_is_wholly_cached_is_computed(num_tokens: int) -> None:
    # vllm-project/vllm#30320
    blocks = cached(20, {1: A})
    (found,) = blocks.allocate([request(2, A[:num_tokens])]) or []
    assert found == (num_tokens - 1) // 4 * 4


@POLICIES
@pytest.mark.parametrize("num_tokens", [8, 9, 16])
def test_a_prompt_that_was_just_answered_costs_one_block_at_most(policy: str, num_tokens: int) -> None:
    # vllm-project/vllm#30320
    stepper = Stepper(policy=policy, has_prefix_cache=True)
    for number in range(3):
        group = stepper.add(f"r{number}", num_tokens, max_tokens=1)
        record = stepper.step()
        expected = num_tokens if number == 0 else num_tokens - (num_tokens - 1) // 4 * 4
        assert chunk_sizes(record) == {f"r{number}": expected}
        assert group.num_cached_tokens == num_tokens - expected
    stepper.run_to_end()


def test_different_salts_share_nothing_and_equal_ones_share_all() -> None:
    # vllm-project/vllm#12621, vllm-project/vllm#15297
    stepper = Stepper(has_prefix_cache=True)
    for number, salt in enumerate(["", "one", "two", "one", ""]):
        stepper.add(f"r{number}", 16, max_tokens=1, salt=salt)
        stepper.step()
    assert [group.num_cached_tokens for group in stepper.groups.values()] == [0, 0, 0, 12, 12]


def test_blocks_are_found_only_once_they_are_computed() -> None:
    stepper = Stepper(budget=16, has_prefix_cache=True)
    stepper.add("first", 32)
    stepper.step()
    second = stepper.add("second", 32)
    planned = stepper.plan()
    stepper.abort("first")
    # The second half is in flight: only the first half can be found.
    stepper.plan()
    assert second.num_cached_tokens == 16
    assert chunk_sizes(stepper.scheduler.records.newest) == {"second": 16}
    assert planned.chunks[0].start == 16


def test_generated_tokens_are_found_as_well() -> None:
    stepper = Stepper(has_prefix_cache=True)
    turn = stepper.add("first turn", 10, max_tokens=10)
    stepper.run_to_end()
    answer = turn.sequences[0].token_ids
    second = stepper.add("second turn", [*answer, 1, 2, 3], max_tokens=1)
    stepper.step()
    # 20 tokens are known, the last of which was sampled and never computed.
    assert second.num_cached_tokens == 16


def test_a_common_beginning_that_is_still_in_use_is_shared_and_outlives_its_first_user() -> None:
    stepper = Stepper(has_prefix_cache=True)
    stepper.add("first", 9)
    stepper.step()
    stepper.add("second", 9)
    stepper.step()
    assert stepper.blocks.num_used_device_blocks == 2 + 1 + 1
    stepper.abort("first")
    assert stepper.blocks.num_used_device_blocks == 3
    stepper.run_to_end(max_steps=60)


def test_cached_blocks_count_as_free_and_give_way_to_a_prompt_that_fills_the_pool() -> None:
    stepper = Stepper(num_blocks=8, has_prefix_cache=True, watermark=0.25)
    stepper.add("cached", 16, max_tokens=1)
    stepper.step()
    assert (stepper.blocks.num_free_device_blocks, stepper.blocks.num_cached_device_blocks) == (8, 4)
    stepper.add("whole pool", [7] * 32, max_tokens=1)
    assert stepper.step().admitted == ["whole pool"]


def test_admission_never_counts_its_own_hits_as_free() -> None:
    # 3 of 5 blocks are cached and hit: what is left above the watermark are 2 less the one of the watermark.
    blocks = BlockManager(4, 10 + 1, watermark=0.2)
    blocks.allocate([TableRequest(9, 20)])
    keys = block_keys(A, 4)
    blocks.allocate([TableRequest(1, 12, keys)])
    blocks.publish(1, 0, keys)
    blocks.free(1)
    assert blocks.num_admissible_device_blocks == 3
    long = [*A, 5, 5, 5, 5]
    assert blocks.num_needed_blocks([request(2, long)]) == 4
    assert blocks.allocate([request(2, long)]) is None
    assert blocks.allocate([request(2, A)]) == [8]
    blocks.check_integrity()


def test_hits_on_blocks_that_others_hold_cost_nothing() -> None:
    blocks = manager(4)
    keys = block_keys(A, 4)
    blocks.allocate([TableRequest(1, 12, keys)])
    blocks.publish(1, 0, keys)
    assert blocks.num_needed_blocks([request(2, [*A, 5])]) == 1
    assert blocks.allocate([request(2, [*A, 5])]) == [12]


def test_the_least_recently_used_prefix_is_evicted_first_and_its_tail_before_its_head() -> None:
    blocks = cached(6, {1: A, 2: B})
    blocks.allocate([request(3, [*A[:8], 9])])  # uses A again, and takes the tail of A, the oldest block
    blocks.free(3)
    assert blocks.allocate([request(4, A)]) == [8]
    blocks.free(4)
    # 4 empty or cached blocks older than the head of A: B goes.
    blocks.allocate([TableRequest(5, 16)])
    blocks.free(5)
    assert blocks.num_needed_blocks([request(6, B)]) == 3
    assert blocks.allocate([request(7, A)]) == [8]


def test_blocks_in_use_are_never_evicted() -> None:
    blocks = cached(6, {1: A})
    blocks.allocate([request(2, [*A, 5])])
    held = list(blocks.block_table(2))
    assert blocks.allocate([TableRequest(3, 8)]) == [0]
    assert blocks.allocate([TableRequest(4, 1)]) is None
    assert not set(held) & set(blocks.block_table(3))
    assert blocks.block_table(2) == held


def test_blocks_that_a_step_in_flight_reads_are_never_evicted() -> None:
    stepper = Stepper(num_blocks=4, has_prefix_cache=True)
    stepper.add("cached", 12, max_tokens=1)
    stepper.step()
    stepper.add("reads", 13)
    planned = stepper.plan()
    assert planned.chunks[0].start == 12
    stepper.abort("reads")
    stepper.add("large", [7] * 16, max_tokens=1)
    assert stepper.plan().is_empty
    stepper.settle(planned)
    assert stepper.step().admitted == ["large"]


def test_the_key_of_an_evicted_block_finds_nothing_however_the_block_is_used_later() -> None:
    # vllm-project/vllm#4764
    blocks = cached(3, {1: A})
    blocks.allocate([request(2, B)])
    blocks.publish(2, 0, block_keys(B, 4))
    blocks.free(2)
    assert blocks.num_needed_blocks([request(3, A)]) == 3
    assert blocks.allocate([request(3, A)]) == [0]
    blocks.check_integrity()


def test_a_second_copy_of_a_block_is_just_a_block() -> None:
    blocks = manager(6)
    keys = block_keys(A, 4)
    for seq_id in (1, 2):
        blocks.allocate([TableRequest(seq_id, 12, keys)])
    for seq_id in (1, 2):
        blocks.publish(seq_id, 0, keys)
    blocks.free(2)
    assert blocks.num_cached_device_blocks == 0
    blocks.free(1)
    assert blocks.num_cached_device_blocks == 3


def test_what_a_recomputed_victim_had_is_found_again_unless_it_was_evicted() -> None:
    stepper = Stepper(num_blocks=8, has_prefix_cache=True)
    stepper.add("old", [7] * 7, max_tokens=10)
    victim = stepper.add("victim", 19, max_tokens=9)
    stepper.step()
    while not stepper.waiting:
        stepper.step()
    assert victims(stepper.scheduler.records.newest) == [("victim", "recompute")]
    while "victim" not in stepper.scheduler.records.newest.resumed:
        stepper.step()
    (chunk,) = stepper.scheduler.records.newest.prefill_chunks
    # 23 tokens were known; the 5 full blocks of 20 are still there but for those that "old" took.
    assert chunk.start >= 12
    assert victim.num_cached_tokens == 0  # that is what the cache gave of the new prompt
    stepper.run_to_end()
    assert stepper.num_output_tokens("victim") == 9


def test_samples_of_a_group_find_the_prompt_of_an_earlier_one() -> None:
    stepper = Stepper(has_prefix_cache=True)
    stepper.add("first", 10, max_tokens=4, n=4)
    stepper.run_to_end()
    second = stepper.add("second", 10, max_tokens=4, n=4)
    assert chunk_sizes(stepper.step()) == {"second": 2}
    assert second.num_cached_tokens == 8
    stepper.run_to_end()
    assert {stepper.num_output_tokens("second", index) for index in range(4)} == {4}


@pytest.mark.parametrize("mode", ["recompute", "swap"])
@pytest.mark.parametrize("num_in_flight", [1, 2])
def test_shared_prefixes_under_eviction_pressure_give_solo_answers(mode: str, num_in_flight: int) -> None:
    # vllm-project/vllm#37076: 20 requests whose common beginnings end around a block border, in a pool that is full.
    rng = Random(37076)
    prefix = [rng.randrange(40) for _ in range(129)]
    arrivals = [
        Arrival(
            number // 2,
            f"r{number}",
            prefix[: 127 + number % 3] + [rng.randrange(40) for _ in range(1 + number % 20)],
            30,
            num_samples=1 + number % 3,
            has_stop_token=False,
        )
        for number in range(20)
    ]
    config = Stepper(mode=mode, budget=96, max_num_seqs=24, max_model_len=200).scheduler.config
    scenario = Scenario(config, 16, 30, 40, arrivals, num_in_flight, has_prefix_cache=True)
    played = Player(scenario).play()
    check_answers(scenario, played)
    assert played.num_hit_blocks > 40
    assert played.num_recomputes + played.num_swaps > 2


def test_hundreds_of_requests_leave_as_many_blocks_as_there_were() -> None:
    # kekzl/imp#1115
    stepper = Stepper(num_blocks=12, has_prefix_cache=True)
    for number in range(200):
        stepper.add(f"r{number}", [number % 7] * (5 + number % 9), max_tokens=1 + number % 4)
        stepper.run_to_end()
        assert stepper.blocks.num_free_device_blocks == 12
    assert stepper.blocks.num_cached_device_blocks <= 12
    counts = stepper.blocks.prefix_counts
    assert 0 < counts.num_hit_blocks < counts.num_queried_blocks
