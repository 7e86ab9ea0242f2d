"""Groups of several sequences that are preempted: what they share moves once, and they come back member by member."""

import pytest

from tests.scheduling import Stepper, victims

POLICIES = pytest.mark.parametrize("policy", ["default", "chunked_prefill"])


def preempted_group(mode: str, policy: str = "chunked_prefill", **options: int) -> Stepper:
    """ "old" has just taken the blocks of "group": 3 samples of 2 tokens after a prompt of 10."""
    stepper = Stepper(policy=policy, mode=mode, num_blocks=8, num_host_blocks=20, max_num_seqs=8, **options)
    stepper.add("old", 11)
    stepper.add("group", 10, max_tokens=6, n=3)
    while "group" in stepper.running or not stepper.groups["group"].num_preemptions:
        stepper.step()
    return stepper


def test_blocks_that_siblings_share_are_moved_once_and_shared_again_afterwards() -> None:
    stepper = preempted_group("swap")
    # 2 blocks of the prompt are shared, and each sample has a third one of its own.
    assert stepper.blocks.num_used_host_blocks == 2 + 3
    stepper.finish("old")
    resuming = stepper.plan()
    assert len(resuming.blocks_to_swap_in) == 5
    tables = [chunk.block_table for chunk in resuming.chunks]
    assert tables[0][:2] == tables[1][:2] == tables[2][:2]
    assert stepper.blocks.num_used_host_blocks == 0
    stepper.settle(resuming)
    stepper.run_to_end()
    assert {stepper.num_output_tokens("group", index) for index in range(3)} == {6}


def test_a_prompt_that_was_swapped_while_siblings_had_yet_to_part_keeps_its_blocks_for_them() -> None:
    stepper = Stepper(mode="swap", budget=8, num_blocks=9, num_host_blocks=20)
    stepper.add("old", 7)
    stepper.step()
    stepper.add("group", 18, max_tokens=2, n=3)
    while not stepper.swapped:
        stepper.step()
    assert not stepper.groups["group"].is_forked
    stepper.finish("old")
    stepper.step()
    # 5 blocks for the prompt, 2 for the copies.
    assert stepper.blocks.num_used_device_blocks == 7
    stepper.run_to_end()
    assert {stepper.num_output_tokens("group", index) for index in range(3)} == {2}


def test_a_recomputed_group_refills_the_common_prefix_once_then_each_members_own_tail() -> None:
    stepper = preempted_group("recompute")
    num_known = [stepper.num_output_tokens("group", index) for index in range(3)]
    assert num_known == [2, 2, 2]
    stepper.finish("old")
    outputs = stepper.plan()
    # All but the last known token of each; the 8 tokens of the two shared blocks are run once.
    assert [(chunk.start, chunk.token_chunk_size) for chunk in outputs.chunks] == [(0, 11), (8, 3), (8, 3)]
    assert not any(chunk.do_sample for chunk in outputs.chunks)
    stepper.settle(outputs)
    outputs = stepper.plan()
    assert [(c.start, c.token_chunk_size, c.do_sample) for c in outputs.chunks] == [(11, 1, True)] * 3
    stepper.settle(outputs)
    stepper.run_to_end()


@pytest.mark.parametrize("budget", [8, 9, 11, 13, 64])
def test_no_member_samples_until_all_of_them_are_there(budget: int) -> None:
    stepper = preempted_group("recompute", budget=budget)
    stepper.finish("old")
    group = stepper.groups["group"]
    num_known = stepper.num_output_tokens("group")
    sampled: list[list[bool]] = []
    while not sampled or not any(sampled[-1]):
        outputs = stepper.plan()
        sampled.append([chunk.do_sample for chunk in outputs.chunks])
        stepper.settle(outputs)
    assert sampled[-1] == [True, True, True]
    assert len(sampled) > 1
    assert {seq.num_output_tokens for seq in group.live} == {num_known + 1}


@POLICIES
@pytest.mark.parametrize("mode", ["recompute", "swap"])
@pytest.mark.parametrize("index", [0, 1, 2])
@pytest.mark.parametrize("num_steps", [0, 1, 2, 3])
def test_a_sample_may_end_outside_while_its_group_is_away_or_on_its_way_back(
    policy: str, mode: str, index: int, num_steps: int
) -> None:
    budget = 64 if policy == "default" else 8
    stepper = preempted_group(mode, policy, budget=budget)
    stepper.finish("old")
    stepper.steps(num_steps)
    before = stepper.num_output_tokens("group", index)
    stepper.finish("group", index)
    assert stepper.sample_ends["group", index].finish_reason == "stop"
    stepper.run_to_end(max_steps=40)
    others = {stepper.num_output_tokens("group", other) for other in range(3) if other != index}
    assert (stepper.num_output_tokens("group", index), others) == (before, {6})


@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_the_last_members_that_end_outside_take_their_group_with_them(mode: str) -> None:
    stepper = preempted_group(mode)
    for index in range(3):
        assert stepper.scheduler.has_unfinished()
        stepper.finish("group", index)
    stepper.finish("old")
    assert not stepper.scheduler.has_unfinished()
    stepper.run_to_end()
    assert stepper.blocks.num_used_host_blocks == 0


def test_a_group_is_the_victim_as_a_whole_and_gives_all_its_blocks() -> None:
    stepper = Stepper(mode="swap", num_blocks=11, num_host_blocks=20)
    stepper.add("old", 8)
    stepper.add("group", 9, n=3)
    held = 0
    while not stepper.swapped:
        held = stepper.num_held_blocks("group")
        record = stepper.step()
    assert victims(record) == [("group", "swap")]
    assert record.preemptions[0].num_blocks == held
    assert stepper.blocks.num_used_device_blocks == stepper.num_held_blocks("old")


def test_a_host_pool_that_is_full_makes_a_group_recompute() -> None:
    stepper = Stepper(mode="swap", num_blocks=8, num_host_blocks=4)
    stepper.add("old", 11, max_tokens=12)
    stepper.add("group", 10, max_tokens=6, n=3)
    records = stepper.run_to_end()
    reasons = {(p.mode, p.reason) for record in records for p in record.preemptions}
    assert reasons == {("recompute", "host_pool_full")}
    assert {stepper.num_output_tokens("group", index) for index in range(3)} == {6}
