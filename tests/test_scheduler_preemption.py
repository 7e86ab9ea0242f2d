"""Who gives up its blocks, where its cache goes, and when it comes back."""

import pytest

from scheduler.records import WaitReason
from tests.scheduling import Stepper, chunk_sizes, victims

POLICIES = pytest.mark.parametrize("policy", ["default", "chunked_prefill"])
MODES = pytest.mark.parametrize("mode", ["recompute", "swap"])


def two_that_need_a_block(policy: str = "chunked_prefill", mode: str = "recompute", **options: int) -> Stepper:
    """Two steps on, "old" and "new" have filled two blocks each, and there is no third one for either."""
    stepper = Stepper(policy=policy, mode=mode, num_blocks=4, **{"num_host_blocks": 8, **options})
    stepper.add("old", 7)
    stepper.add("new", 7)
    stepper.steps(2)
    return stepper


@POLICIES
@MODES
def test_a_decode_without_a_slot_preempts_the_newest(policy: str, mode: str) -> None:
    stepper = two_that_need_a_block(policy, mode)
    record = stepper.step()
    (preemption,) = record.preemptions
    assert (preemption.victim, preemption.beneficiary, preemption.mode) == ("new", "old", mode)
    assert (preemption.num_blocks, preemption.reason) == (2, "blocks")
    assert preemption.num_discarded_tokens == (8 if mode == "recompute" else 0)
    assert record.decode_request_ids == ["old"]
    assert record.num_blocks_swapped_out == (2 if mode == "swap" else 0)
    assert (stepper.waiting, stepper.swapped) == ((["new"], []) if mode == "recompute" else ([], ["new"]))


def test_a_step_preempts_no_more_than_its_slots_take() -> None:
    stepper = Stepper(num_blocks=8)
    for request_id in ("a", "b", "c", "d"):
        stepper.add(request_id, 7)
    *_, record = stepper.steps(3)
    # The two blocks of "d" serve "a" and "b"; "c" is the last one left and gives way itself.
    assert [(p.victim, p.beneficiary) for p in record.preemptions] == [("d", "a"), ("c", "c")]
    assert stepper.running == ["a", "b"]
    assert stepper.waiting == ["c", "d"]


@POLICIES
def test_with_no_victim_left_behind_it_a_decode_preempts_itself(policy: str) -> None:
    stepper = Stepper(policy=policy, num_blocks=4)
    stepper.add("old", 8)
    stepper.add("new", 7)
    stepper.step()
    record = stepper.step()  # "old" takes a third block? There is none but those of "new"
    assert victims(record) == [("new", "recompute")]
    alone = Stepper(policy=policy, num_blocks=5)
    alone.add("old", 9)
    alone.add("new", 7)
    alone.steps(2)
    record = alone.step()
    assert [(p.victim, p.beneficiary) for p in record.preemptions] == [("new", "new")]
    assert record.decode_request_ids == ["old"]


@POLICIES
@MODES
def test_a_victim_comes_back_only_after_those_it_made_room_for(policy: str, mode: str) -> None:
    stepper = Stepper(policy=policy, mode=mode, num_blocks=6, num_host_blocks=20)
    for request_id in ("a", "b", "c"):
        stepper.add(request_id, 7, max_tokens=12)
    made_room_for: dict[str, set[str]] = {"b": set(), "c": set()}
    came_back: list[str] = []
    while stepper.scheduler.has_unfinished():
        record = stepper.step()
        for preemption in record.preemptions:
            made_room_for[preemption.victim].add(preemption.beneficiary)
        for request_id in record.resumed:
            assert not made_room_for[request_id] & {*stepper.waiting, *stepper.swapped}
        came_back += record.resumed
    assert made_room_for == {"b": {"a"}, "c": {"a"}}
    assert came_back == ["b", "c"]


@POLICIES
@MODES
def test_preemption_changes_no_token_count(policy: str, mode: str) -> None:
    stepper = Stepper(policy=policy, mode=mode, num_blocks=9, num_host_blocks=6, max_num_seqs=6)
    for number in range(6):
        stepper.add(f"r{number}", 4 + number, max_tokens=20)
    records = stepper.run_to_end()
    assert sum(len(record.preemptions) for record in records) >= 5
    assert [stepper.num_output_tokens(f"r{number}") for number in range(6)] == [20] * 6


def test_a_prompt_that_is_midway_is_a_victim_too() -> None:
    stepper = Stepper(num_blocks=7, budget=8)
    stepper.add("old", 7)
    stepper.step()
    stepper.add("midway", 18)
    *_, record = stepper.steps(2)
    assert victims(record) == [("midway", "recompute")]
    assert record.decode_request_ids == ["old"]
    assert record.preemptions[0].num_discarded_tokens == 7


def test_prompts_midway_go_on_in_a_step_that_preempted_and_new_ones_do_not() -> None:
    stepper = Stepper(num_blocks=19, budget=24, max_model_len=100, chunk_alignment=10)
    stepper.add("old", 7)
    stepper.add("midway", 60)
    stepper.add("victim", 4)
    stepper.steps(2)
    stepper.add("new", 1)
    record = stepper.step()
    assert victims(record) == [("victim", "recompute")]
    assert chunk_sizes(record) == {"midway": 20}
    assert stepper.waiting == ["victim", "new"]
    assert record.waiting_reason is WaitReason.PREEMPTION


@POLICIES
def test_a_full_host_pool_falls_back_to_recompute(policy: str) -> None:
    stepper = two_that_need_a_block(policy, "swap", num_host_blocks=1)
    (preemption,) = stepper.step().preemptions
    assert (preemption.mode, preemption.reason) == ("recompute", "host_pool_full")
    assert preemption.num_discarded_tokens == 8
    assert stepper.waiting == ["new"]
    stepper.run_to_end()


def test_victims_that_advanced_since_they_came_back_are_preferred() -> None:
    stepper = Stepper(num_blocks=9)
    stepper.add("old", 7)
    stepper.add("middle", 7)
    stepper.add("newest", 7)
    stepper.step()
    newest = stepper.groups["newest"]
    while not stepper.scheduler.records.newest.preemptions:
        newest.num_tokens_at_resume = newest.sequences[0].num_tokens - 15
        stepper.step()
    assert victims(stepper.scheduler.records.newest) == [("middle", "recompute")]


def test_a_victim_that_advanced_16_tokens_is_the_newest_again() -> None:
    stepper = Stepper(num_blocks=9)
    for request_id in ("old", "middle", "newest"):
        stepper.add(request_id, 7)
    stepper.step()
    newest = stepper.groups["newest"]
    while not stepper.scheduler.records.newest.preemptions:
        newest.num_tokens_at_resume = newest.sequences[0].num_tokens - 16
        stepper.step()
    assert victims(stepper.scheduler.records.newest) == [("newest", "recompute")]


def test_when_nobody_advanced_the_newest_gives_way() -> None:
    stepper = two_that_need_a_block()
    new = stepper.groups["new"]
    new.num_tokens_at_resume = new.sequences[0].num_tokens
    assert victims(stepper.step()) == [("new", "recompute")]


def test_swapped_ones_come_back_oldest_first_and_only_when_nothing_was_preempted() -> None:
    stepper = Stepper(mode="swap", num_blocks=9, num_host_blocks=20)
    for request_id in ("a", "b", "c"):
        stepper.add(request_id, 11, max_tokens=14)
    order: list[str] = []
    for record in stepper.run_to_end():
        order += record.resumed
        if record.preemptions:
            assert record.resumed == []
            assert record.num_blocks_swapped_in == 0
    assert order[:2] == ["b", "c"]


@MODES
def test_a_step_that_preempts_lets_nobody_in_even_where_its_victim_left_room(mode: str) -> None:
    stepper = Stepper(mode=mode, num_blocks=9, num_host_blocks=20)
    for request_id, num_tokens in (("old", 7), ("small", 7), ("large", 19)):
        stepper.add(request_id, num_tokens)
    large = stepper.groups["large"]
    stepper.step()
    while "small" in stepper.running:
        large.num_tokens_at_resume = large.sequences[0].num_tokens  # so "small" goes first
        stepper.step()
    while "large" in stepper.running:
        record = stepper.step()
    assert stepper.blocks.num_free_device_blocks == 5
    assert (record.resumed, record.num_blocks_swapped_in) == ([], 0)
    assert stepper.step().resumed == ["small"]


def test_a_swapped_one_that_must_wait_stops_those_behind_it() -> None:
    stepper = Stepper(mode="swap", num_blocks=10, num_host_blocks=20)
    stepper.add("old", 7, max_tokens=30)
    stepper.add("large", 19, max_tokens=30)
    stepper.add("small", 3, max_tokens=30)
    while stepper.swapped != ["large", "small"]:
        stepper.step()
    record = stepper.step()
    # "small" would fit.
    assert stepper.blocks.num_free_device_blocks >= 2
    assert record.swapped_reason is WaitReason.BLOCKS
    assert record.resumed == []


def test_re_admission_needs_room_for_the_whole_known_sequence() -> None:
    stepper = two_that_need_a_block()
    stepper.step()
    record = stepper.step()
    # "new" was 7 tokens when it came; its 9 known tokens need 3 blocks, and 1 is free.
    assert stepper.blocks.num_free_device_blocks == 1
    assert record.waiting_reason is WaitReason.BLOCKS
    stepper.finish("old")
    assert stepper.step().resumed == ["new"]
    assert stepper.num_held_blocks("new") == 3


@POLICIES
@MODES
def test_a_victim_comes_back_above_the_watermark_which_is_waived_when_it_is_alone(policy: str, mode: str) -> None:
    stepper = Stepper(policy=policy, mode=mode, num_blocks=8, num_host_blocks=8, watermark=0.25)
    stepper.add("old", 7)
    stepper.add("filler", 7)
    stepper.add("victim", 7)
    while stepper.num_output_tokens("old") < 7:
        stepper.step()
    assert stepper.blocks.num_free_device_blocks == 0
    stepper.finish("filler")
    record = stepper.step()
    # 4 blocks are free: 3 for its known tokens, but not 2 more above them.
    assert record.resumed == []
    assert WaitReason.BLOCKS in (record.waiting_reason, record.swapped_reason)
    stepper.finish("old")
    assert stepper.step().resumed == ["victim"]
