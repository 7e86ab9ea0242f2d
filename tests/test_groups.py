"""Groups of several sequences: admitted, run, preempted and brought back as one, with the blocks they share."""

import pytest

from scheduler import RequestTooLargeError
from scheduler.records import WaitReason
from tests.scheduling import STOP_TOKEN, Stepper, chunk_sizes, victims

POLICIES = pytest.mark.parametrize("policy", ["default", "chunked_prefill"])
MODES = pytest.mark.parametrize("mode", ["recompute", "swap", "auto"])


def test_a_prompt_is_computed_once_and_gives_each_sample_a_first_token() -> None:
    stepper = Stepper(budget=16)
    group = stepper.add("group", 20, max_tokens=3, n=4)
    stepper.samples["group"] = [11, 12, 13, 14]
    first = stepper.plan()
    assert [chunk.do_sample for chunk in first.chunks] == [False]
    stepper.settle(first)
    second = stepper.plan()
    (chunk,) = second.chunks
    assert (chunk.start, chunk.token_chunk_size, chunk.sample_indices) == (16, 4, [0, 1, 2, 3])
    stepper.settle(second)
    assert [seq.token_ids[20:] for seq in group.sequences] == [[11], [12], [13], [14]]
    third = stepper.plan()
    assert [(c.start, c.token_ids, c.sample_indices) for c in third.chunks] == [
        (20, [token], None) for token in (11, 12, 13, 14)
    ]


@POLICIES
def test_siblings_share_full_prompt_blocks_and_copy_the_last_one_when_they_write(policy: str) -> None:
    stepper = Stepper(policy=policy)
    stepper.add("group", 10, n=3)
    stepper.step()
    assert stepper.blocks.num_used_device_blocks == 3 + 2  # two are kept for the copies
    outputs = stepper.plan()
    tables = [chunk.block_table for chunk in outputs.chunks]
    assert tables[0][:2] == tables[1][:2] == tables[2][:2]
    assert len({table[2] for table in tables}) == 3
    assert len(outputs.blocks_to_copy) == 2
    assert stepper.blocks.num_used_device_blocks == 5


def test_nothing_is_copied_or_kept_where_the_prompt_ends_with_its_last_block() -> None:
    stepper = Stepper()
    stepper.add("group", 8, n=3)
    stepper.step()
    assert stepper.blocks.num_used_device_blocks == 2
    outputs = stepper.plan()
    assert outputs.blocks_to_copy == []
    assert stepper.blocks.num_used_device_blocks == 5


@POLICIES
def test_the_blocks_of_the_first_writes_are_kept_from_admission_on(policy: str) -> None:
    # 3 blocks hold the prompt, 7 are for the copies: the pool is full from the start.
    stepper = Stepper(policy=policy, num_blocks=10)
    stepper.add("group", 10, max_tokens=2, n=8)
    stepper.add("next", 1, max_tokens=1)
    record = stepper.step()
    assert record.admitted == ["group"]
    assert stepper.blocks.num_free_device_blocks == 0
    assert stepper.step().preemptions == []
    assert {stepper.num_output_tokens("group", index) for index in range(8)} == {2}
    stepper.run_to_end()


def test_blocks_that_are_kept_for_a_group_are_no_room_for_a_growing_neighbour() -> None:
    stepper = Stepper(num_blocks=9, budget=8)
    stepper.add("neighbour", 4)
    stepper.step()
    # 5 blocks of prompt and 2 for the copies: 1 is left for "neighbour", who wants a second one 4 tokens later.
    stepper.add("group", 18, max_tokens=8, n=3)
    records = stepper.steps(6)
    first = next(record for record in records if record.preemptions)
    assert first.preemptions[0].victim == "group"
    assert not any(record.preemptions for record in records[: records.index(first)])


@POLICIES
def test_a_group_takes_a_slot_for_each_sequence_before_they_part(policy: str) -> None:
    stepper = Stepper(policy=policy, max_num_seqs=8)
    stepper.add("group", 5, n=6)
    stepper.add("pair", 5, n=2)
    stepper.add("waits", 5)
    record = stepper.step()
    assert record.admitted == ["group", "pair"]
    assert record.waiting_reason is WaitReason.SEQUENCE_SLOTS
    assert len(stepper.plan().chunks) == 8


def test_a_sample_that_ends_gives_its_slot_and_its_own_blocks_back() -> None:
    stepper = Stepper(max_num_seqs=2)
    stepper.add("group", 6, n=2)
    stepper.steps(2)
    stepper.add("waits", 5)
    before = stepper.blocks.num_used_device_blocks
    stepper.finish("group", 1)
    assert stepper.sample_ends["group", 1].finish_reason == "stop"
    assert stepper.blocks.num_used_device_blocks == before - 1
    assert stepper.step().admitted == ["waits"]
    assert stepper.running == ["group", "waits"]


def test_a_group_runs_whole_or_not_at_all() -> None:
    stepper = Stepper(num_blocks=14, max_num_seqs=12)
    stepper.add("old", 8, n=4, max_tokens=20)
    stepper.add("new", 8, n=4, max_tokens=20)
    while stepper.scheduler.has_unfinished():
        record = stepper.step()
        for request_id in ("old", "new"):
            assert record.decode_request_ids.count(request_id) in (0, len(stepper.groups[request_id].live) or 4)


def test_more_samples_than_slots_or_blocks_for_their_copies_are_refused_on_arrival() -> None:
    stepper = Stepper(max_num_seqs=8, num_blocks=9)
    with pytest.raises(RequestTooLargeError, match="9 sequences were asked for; at most 8 run"):
        stepper.add("many", 5, n=9)
    with pytest.raises(RequestTooLargeError, match="needs 10 cache blocks for 8 sequences; there are 9"):
        stepper.add("copies", 10, n=8)
    stepper.add("fits", 8, n=8, max_tokens=1)
    stepper.run_to_end(max_steps=1)


@POLICIES
@MODES
def test_a_group_of_8_in_a_pool_that_it_barely_fits_swaps_and_finishes(policy: str, mode: str) -> None:
    # 8 answers of 6 tokens after 10 of prompt: 2 shared blocks and 2 blocks each at their longest.
    stepper = Stepper(policy=policy, mode=mode, num_blocks=2 + 8 * 2, num_host_blocks=100, max_num_seqs=12)
    stepper.add("old", 10, max_tokens=30)
    stepper.add("group", 10, max_tokens=6, n=8)
    records = stepper.run_to_end(max_steps=80)
    preempted = [entry for record in records for entry in victims(record)]
    assert preempted
    # Groups of several prefer swap where there is a choice.
    assert {how for _, how in preempted} == {"recompute" if mode == "recompute" else "swap"}
    assert {stepper.num_output_tokens("group", index) for index in range(8)} == {6}
    assert stepper.num_output_tokens("old") == 30


@POLICIES
@MODES
@pytest.mark.parametrize("has_prefix_cache", [False, True])
def test_fifty_groups_of_8_over_a_small_pool_all_finish(policy: str, mode: str, has_prefix_cache: bool) -> None:
    # vllm-project/vllm#546, vllm-project/vllm#5578
    stepper = Stepper(
        policy=policy,
        mode=mode,
        num_blocks=44,
        num_host_blocks=60,
        max_num_seqs=32,
        has_prefix_cache=has_prefix_cache,
    )
    for number in range(50):
        stepper.add(f"g{number}", 5 + number % 13, max_tokens=6 + number % 11, n=8)
    most_swapped = 0
    num_steps = 0
    while stepper.scheduler.has_unfinished():
        swapped_before = set(stepper.swapped)
        record = stepper.step()
        assert not (record.admitted and swapped_before & set(stepper.swapped)), "passed a swapped group"
        most_swapped = max(most_swapped, record.num_swapped)
        num_steps += 1
        assert num_steps < 1000
    assert (most_swapped > 0) == (mode != "recompute")
    assert stepper.blocks.num_used_device_blocks == stepper.blocks.num_used_host_blocks == 0
    assert len(stepper.sample_ends) == 400
    for number in range(50):
        lengths = {stepper.num_output_tokens(f"g{number}", index) for index in range(8)}
        assert lengths == {6 + number % 11}


@POLICIES
@MODES
def test_many_samples_of_a_long_prompt_finish_or_end_alone_when_swap_is_touched(policy: str, mode: str) -> None:
    # vllm-project/vllm#546: all work stopped.
    stepper = Stepper(
        policy=policy, mode=mode, budget=512, max_model_len=512, num_blocks=330, num_host_blocks=700, max_num_seqs=140
    )
    stepper.add("early", 30, max_tokens=60)
    stepper.add("many", 400, max_tokens=40, n=125)
    stepper.add("later", 30, max_tokens=5)
    stepper.run_to_end(max_steps=200)
    assert (stepper.num_output_tokens("early"), stepper.num_output_tokens("later")) == (60, 5)
    ends = {end.finish_reason for (request_id, _), end in stepper.sample_ends.items() if request_id == "many"}
    assert ends == {"length"}


@POLICIES
@MODES
@pytest.mark.parametrize("watermark", [0.0, 0.1])
def test_a_sequence_near_the_model_length_in_the_smallest_legal_pool_finishes(
    policy: str, mode: str, watermark: float
) -> None:
    stepper = Stepper(policy=policy, mode=mode, num_blocks=16, num_host_blocks=16, watermark=watermark)
    stepper.add("before", 20, max_tokens=9)
    stepper.add("near", 63, max_tokens=50)
    stepper.add("middle", 40, max_tokens=50)
    stepper.run_to_end()
    assert (stepper.num_output_tokens("near"), stepper.num_output_tokens("middle")) == (1, 24)
    assert {end.finish_reason for end in stepper.ends.values()} == {"length"}


def test_a_group_that_outgrows_the_pool_ends_with_length_for_every_sample() -> None:
    stepper = Stepper(num_blocks=8)
    stepper.add("group", 8, n=4)
    stepper.add("next", 8, max_tokens=2)
    stepper.run_to_end(max_steps=30)
    assert [stepper.sample_ends["group", index].finish_reason for index in range(4)] == ["length"] * 4
    assert stepper.num_output_tokens("next") == 2


def test_the_samples_of_a_group_end_one_by_one() -> None:
    stepper = Stepper()
    stepper.add("group", 6, n=3, max_tokens=4)
    stepper.samples["group"] = [5, STOP_TOKEN, 5, 5, STOP_TOKEN]
    stepper.run_to_end()
    assert [stepper.num_output_tokens("group", index) for index in range(3)] == [4, 1, 2]
    assert [stepper.sample_ends["group", index].finish_reason for index in range(3)] == ["length", "stop", "stop"]


def test_finish_may_come_at_any_time_and_for_anybody() -> None:
    stepper = Stepper()
    stepper.add("group", 30, n=2, max_tokens=5)
    assert stepper.scheduler.finish("unknown", 0) == []
    assert stepper.scheduler.finish("group", 1) == []  # nobody has seen a token of it yet
    stepper.step()
    stepper.finish("group", 1)
    assert stepper.scheduler.finish("group", 1) == []
    stepper.run_to_end()
    assert [stepper.num_output_tokens("group", index) for index in range(2)] == [5, 1]
    assert chunk_sizes(stepper.scheduler.records.since(0)[0]) == {"group": 30}
