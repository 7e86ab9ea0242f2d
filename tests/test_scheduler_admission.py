"""Who is let in, in which order, and the reason that a step gives when it lets nobody in."""

import pytest

from scheduler import RequestTooLargeError
from scheduler.records import WaitReason
from tests.scheduling import Stepper, chunk_sizes, victims

POLICIES = pytest.mark.parametrize("policy", ["default", "chunked_prefill"])


@POLICIES
def test_a_prompt_that_no_pool_could_hold_is_refused_on_arrival(policy: str) -> None:
    stepper = Stepper(policy=policy, num_blocks=8, budget=256, max_model_len=256)
    with pytest.raises(RequestTooLargeError, match="33 tokens needs 9 cache blocks for 1 sequence; there are 8"):
        stepper.add("too large", 33)
    stepper.add("fits", 32)
    stepper.run_to_end()
    assert stepper.num_output_tokens("fits") == 1


@POLICIES
def test_nobody_passes_a_new_prompt_that_waits_for_blocks(policy: str) -> None:
    stepper = Stepper(policy=policy, num_blocks=8)
    stepper.add("running", 12)
    stepper.step()
    stepper.add("large", 24)
    stepper.add("small", 2)
    record = stepper.step()
    assert record.waiting_reason is WaitReason.BLOCKS
    assert stepper.waiting == ["large", "small"]
    stepper.finish("running")
    assert stepper.step().admitted == ["large", "small"]


@POLICIES
def test_admission_leaves_the_watermark_unless_nobody_holds_blocks(policy: str) -> None:
    stepper = Stepper(policy=policy, num_blocks=8, watermark=0.25)
    stepper.add("whole pool", 32, max_tokens=1)
    assert stepper.step().admitted == ["whole pool"]
    stepper.add("first", 4)
    stepper.add("too much", 24)
    assert stepper.step().admitted == ["first"]
    assert stepper.step().waiting_reason is WaitReason.BLOCKS


@POLICIES
def test_a_new_prompt_never_passes_a_swapped_one(policy: str) -> None:
    stepper = Stepper(policy=policy, mode="swap", num_blocks=5, num_host_blocks=8)
    stepper.add("old", 7)
    stepper.add("swapped", 7)
    while not stepper.swapped:
        stepper.step()
    stepper.add("new", 1)
    assert stepper.blocks.num_free_device_blocks >= 1
    record = stepper.step()
    assert record.admitted == []
    assert (record.waiting_reason, record.waiting_behind) == (WaitReason.BEHIND_SWAPPED, "swapped")


@POLICIES
def test_a_new_prompt_never_passes_a_recomputed_one(policy: str) -> None:
    stepper = Stepper(policy=policy, num_blocks=5)
    stepper.add("old", 7)
    stepper.add("victim", 7)
    stepper.step()
    while not stepper.waiting:
        stepper.step()
    stepper.add("new", 1)
    assert stepper.blocks.num_free_device_blocks >= 1
    record = stepper.step()
    assert stepper.waiting == ["victim", "new"]
    assert record.waiting_reason is WaitReason.BLOCKS


def recomputed_before_swapped(policy: str) -> Stepper:
    """ "newest" is on the host; "middle", which precedes it, found the host pool full and has to be recomputed."""
    stepper = Stepper(policy=policy, mode="swap", num_blocks=6, num_host_blocks=2)
    for request_id in ("old", "middle", "newest"):
        stepper.add(request_id, 7)
    record = stepper.step()
    while not stepper.waiting:
        record = stepper.step()
    assert victims(record) == [("middle", "recompute")]
    assert (stepper.waiting, stepper.swapped) == (["middle"], ["newest"])
    return stepper


@POLICIES
def test_a_swapped_one_never_passes_a_recomputed_one(policy: str) -> None:
    stepper = recomputed_before_swapped(policy)
    record = stepper.step()
    assert record.resumed == []
    assert record.waiting_reason is WaitReason.BLOCKS
    assert (record.swapped_reason, record.swapped_behind) == (WaitReason.BEHIND_RECOMPUTED, "middle")


def test_under_default_swapped_ones_wait_while_prompts_run() -> None:
    stepper = recomputed_before_swapped("default")
    stepper.finish("old")
    record = stepper.step()
    assert record.resumed == ["middle"]
    assert record.swapped_reason is WaitReason.PREFILLS_FIRST


@POLICIES
def test_a_step_that_preempts_says_so_to_those_who_wait(policy: str) -> None:
    stepper = Stepper(policy=policy, mode="swap", num_blocks=4, num_host_blocks=8)
    stepper.add("old", 7)
    stepper.add("victim", 7)
    stepper.steps(2)
    stepper.add("new", 1)
    record = stepper.step()
    assert victims(record) == [("victim", "swap")]
    assert record.swapped_reason is WaitReason.PREEMPTION
    assert record.waiting_reason is WaitReason.PREEMPTION


@POLICIES
def test_the_head_waits_for_a_sequence_slot(policy: str) -> None:
    stepper = Stepper(policy=policy, max_num_seqs=1)
    stepper.add("running", 5)
    stepper.step()
    stepper.add("waits", 5)
    assert stepper.step().waiting_reason is WaitReason.SEQUENCE_SLOTS


@pytest.mark.parametrize(("policy", "first"), [("default", 40), ("chunked_prefill", 64)])
def test_the_head_waits_for_the_token_budget(policy: str, first: int) -> None:
    stepper = Stepper(policy=policy, budget=64, max_model_len=64 if policy == "default" else 100)
    stepper.add("first", first)
    stepper.add("second", 30)
    record = stepper.step()
    assert record.admitted == ["first"]
    assert record.waiting_reason is WaitReason.TOKEN_BUDGET


def test_the_budget_gate_lets_nobody_beyond_the_tokens_that_are_left() -> None:
    stepper = Stepper(budget=20)
    for number in range(6):
        stepper.add(f"r{number}", 9, max_tokens=4)
    first = stepper.step()
    assert chunk_sizes(first) == {"r0": 9, "r1": 9, "r2": 2}
    assert max(record.num_batched_tokens for record in stepper.run_to_end()) == 20


def test_no_more_prompts_are_midway_than_the_cap_allows() -> None:
    stepper = Stepper(budget=40, max_model_len=400, max_num_partial_prefills=1, chunk_alignment=16)
    stepper.add("first", 100, max_tokens=1)
    stepper.add("second", 100, max_tokens=1)
    record = stepper.step()
    # 8 tokens of the budget are left, which would leave "second" midway.
    assert chunk_sizes(record) == {"first": 32}
    assert record.waiting_reason is WaitReason.PARTIAL_PREFILL_CAP
    while stepper.scheduler.has_unfinished():
        assert sum(group.is_prefilling for group in stepper.scheduler.queues.running) <= 1
        stepper.step()


def test_the_tail_of_a_prompt_packs_with_the_head_of_the_next_under_a_cap_of_one() -> None:
    stepper = Stepper(budget=40, max_model_len=400, max_num_partial_prefills=1)
    for number in range(3):
        stepper.add(f"r{number}", 50, max_tokens=1)
    assert [chunk_sizes(record) for record in stepper.run_to_end()] == [
        {"r0": 40},
        {"r0": 10, "r1": 30},
        {"r1": 20, "r2": 20},
        {"r2": 30},
    ]


def test_a_whole_prompt_comes_in_beside_the_one_that_is_midway() -> None:
    stepper = Stepper(budget=40, max_model_len=400, max_num_partial_prefills=1, chunk_alignment=16)
    stepper.add("midway", 100)
    stepper.add("short", 8)
    assert chunk_sizes(stepper.step()) == {"midway": 32, "short": 8}


def test_shorter_prompts_go_before_a_long_one_which_takes_what_they_leave() -> None:
    stepper = Stepper(budget=40, max_model_len=400, long_prefill_threshold=50)
    stepper.add("long", 200)
    assert chunk_sizes(stepper.step()) == {"long": 40}
    stepper.add("short", 30)
    assert chunk_sizes(stepper.step()) == {"short": 30, "long": 10}


def test_a_long_prompt_that_is_alone_takes_the_whole_budget() -> None:
    stepper = Stepper(budget=40, max_model_len=400, long_prefill_threshold=50)
    stepper.add("long", 200)
    stepper.add("also long", 200)
    assert chunk_sizes(stepper.step()) == {"long": 40}


def test_a_long_prompt_that_shorter_ones_pass_says_so() -> None:
    stepper = Stepper(budget=40, max_model_len=400, long_prefill_threshold=50)
    stepper.add("long", 200)
    stepper.add("short", 45)
    record = stepper.step()
    assert chunk_sizes(record) == {"short": 40}
    assert record.waiting_reason is WaitReason.LONG_PREFILL


@pytest.mark.parametrize("is_midway", [False, True])
def test_a_long_prompt_is_passed_in_a_bounded_number_of_steps_in_a_row(is_midway: bool) -> None:
    stepper = Stepper(budget=40, max_num_seqs=20, max_model_len=400, long_prefill_threshold=50, num_blocks=4000)
    stepper.add("long", 200)
    if is_midway:
        stepper.step()
    served: list[bool] = []
    for number in range(18):
        stepper.add(f"short{number}", 40, max_tokens=1)
        served.append("long" in chunk_sizes(stepper.step()))
    # It has its turn after 8 steps, and yields again after it.
    assert served == [*[False] * 8, True] * 2


def test_a_recomputed_long_prompt_yields_its_place_to_nobody() -> None:
    stepper = Stepper(num_blocks=9, long_prefill_threshold=10)
    stepper.add("old", 7)
    stepper.add("long", 23)
    stepper.step()
    while "long" in stepper.running:
        stepper.step()
    stepper.add("short", 2)
    record = stepper.step()
    assert stepper.blocks.num_free_device_blocks >= 1
    assert stepper.waiting == ["long", "short"]
    assert record.waiting_reason is WaitReason.BLOCKS
