"""Steps that are planned before the ones ahead of them have ended."""

import pytest

from kv_cache import TableRequest
from scheduler import PENDING_TOKEN_ID
from scheduler.records import WaitReason
from scheduler.scheduler import SchedulerStuckError
from tests.scheduling import ORDINARY_TOKEN, STOP_TOKEN, Stepper, victims


def test_a_prompt_goes_on_with_the_next_chunk_while_the_first_is_in_flight() -> None:
    stepper = Stepper(budget=16)
    stepper.add("prompt", 40)
    outputs = [stepper.plan() for _ in range(3)]
    assert [(o.chunks[0].start, o.chunks[0].token_chunk_size) for o in outputs] == [(0, 16), (16, 16), (32, 8)]
    assert [o.chunks[0].do_sample for o in outputs] == [False, False, True]
    seq = stepper.groups["prompt"].sequences[0]
    assert (seq.num_computed_tokens, seq.num_in_flight_tokens) == (0, 40)
    for planned in outputs:
        stepper.settle(planned)
    assert (seq.num_computed_tokens, seq.num_in_flight_tokens, seq.num_output_tokens) == (40, 0, 1)


def test_a_decode_is_planned_for_a_token_that_is_still_being_sampled() -> None:
    stepper = Stepper()
    stepper.add("answer", 5)
    first, second, third = stepper.plan(), stepper.plan(), stepper.plan()
    assert first.chunks[0].token_ids == [100, 101, 102, 103, 104]
    for planned, start in ((second, 5), (third, 6)):
        (chunk,) = planned.chunks
        assert (chunk.start, chunk.token_ids, chunk.do_sample) == (start, [PENDING_TOKEN_ID], True)
        assert len(chunk.block_table) == 2
    for planned in (first, second, third):
        stepper.settle(planned)
    assert stepper.num_output_tokens("answer") == 3
    seq = stepper.groups["answer"].sequences[0]
    assert (seq.num_computed_tokens, seq.num_pending_samples) == (7, 0)


def test_no_step_is_planned_beyond_the_last_token_that_max_tokens_allows() -> None:
    stepper = Stepper()
    stepper.add("answer", 5, max_tokens=2)
    first, second, third = stepper.plan(), stepper.plan(), stepper.plan()
    assert third.is_empty
    stepper.settle(first)
    stepper.settle(second)
    assert stepper.num_output_tokens("answer") == 2
    assert not stepper.scheduler.has_unfinished()


def test_no_step_is_planned_beyond_the_context() -> None:
    stepper = Stepper(max_model_len=7)
    stepper.add("answer", 5)
    outputs = [stepper.plan(), stepper.plan()]
    assert stepper.plan().is_empty
    for planned in outputs:
        stepper.settle(planned)
    assert stepper.ends["answer"].finish_reason == "length"


def test_a_stop_token_ends_an_answer_and_what_was_planned_beyond_it_is_dropped() -> None:
    stepper = Stepper()
    stepper.add("answer", 5)
    stepper.samples["answer"] = [STOP_TOKEN]
    first, second = stepper.plan(), stepper.plan()
    stepper.settle(first)
    assert stepper.ends["answer"].finish_reason == "stop"
    # The second step still writes into its blocks.
    assert stepper.blocks.num_used_device_blocks == 2
    assert stepper.scheduler.has_unfinished()
    stepper.settle(second)
    assert stepper.num_output_tokens("answer") == 1
    assert stepper.blocks.num_used_device_blocks == 0
    assert not stepper.scheduler.has_unfinished()


@pytest.mark.parametrize("num_in_flight", [0, 1, 2])
def test_blocks_of_an_aborted_request_are_freed_when_the_last_step_that_reads_them_has_ended(
    num_in_flight: int,
) -> None:
    stepper = Stepper()
    stepper.add("answer", 5)
    stepper.step()
    outputs = [stepper.plan() for _ in range(num_in_flight)]
    stepper.abort("answer")
    assert stepper.ends["answer"].finish_reason == "abort"
    assert stepper.running == []
    for planned in outputs:
        assert stepper.blocks.num_used_device_blocks == 2
        stepper.settle(planned)
    assert stepper.blocks.num_used_device_blocks == 0
    assert stepper.num_output_tokens("answer") == 1


def test_blocks_of_an_aborted_request_are_not_given_to_others_while_a_step_reads_them() -> None:
    stepper = Stepper(num_blocks=3)
    stepper.add("aborted", 9)
    planned = stepper.plan()
    stepper.abort("aborted")
    stepper.add("next", 9)
    waiting = stepper.plan()
    assert waiting.is_empty
    assert stepper.scheduler.records.newest.waiting_reason is WaitReason.BLOCKS
    stepper.settle(planned)
    assert [chunk.request_id for chunk in stepper.plan().chunks] == ["next"]


def test_a_victim_with_a_step_in_flight_keeps_the_token_of_that_step_and_waits_for_it() -> None:
    stepper = Stepper(num_blocks=4)
    stepper.add("old", 7, max_tokens=3)
    stepper.add("victim", 7, max_tokens=5)
    stepper.step()
    ahead = stepper.plan()
    preempting = stepper.plan()
    assert victims(stepper.scheduler.records.newest) == [("victim", "recompute")]
    stepper.finish("old")
    stepper.plan()
    assert stepper.scheduler.records.newest.waiting_reason is WaitReason.IN_FLIGHT
    stepper.settle(ahead)
    seq = stepper.groups["victim"].sequences[0]
    assert (seq.num_output_tokens, seq.num_computed_tokens, seq.num_in_flight_tokens) == (2, 0, 0)
    stepper.settle(preempting)
    resumed = stepper.plan()
    (chunk,) = resumed.chunks
    assert (chunk.start, chunk.token_chunk_size, chunk.do_sample) == (0, 9, True)
    stepper.settle(resumed)
    stepper.run_to_end()
    assert stepper.num_output_tokens("victim") == 5


def test_a_swapped_victim_waits_until_the_step_that_moves_it_has_ended() -> None:
    stepper = Stepper(mode="swap", num_blocks=4, num_host_blocks=4)
    stepper.add("old", 7)
    stepper.add("victim", 7)
    stepper.steps(2)
    moving = stepper.plan()
    assert len(moving.blocks_to_swap_out) == 2
    stepper.finish("old")
    assert stepper.plan().is_empty
    assert stepper.scheduler.records.newest.swapped_reason is WaitReason.IN_FLIGHT
    stepper.settle(moving)
    assert len(stepper.plan().blocks_to_swap_in) == 2


@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_an_abort_of_a_victim_in_flight_gives_everything_back(mode: str) -> None:
    stepper = Stepper(mode=mode, num_blocks=4, num_host_blocks=4)
    stepper.add("old", 7)
    stepper.add("victim", 7)
    stepper.step()
    ahead, preempting = stepper.plan(), stepper.plan()
    stepper.abort("victim")
    stepper.abort("old")
    stepper.settle(ahead)
    stepper.settle(preempting)
    stepper.run_to_end()
    assert stepper.scheduler.num_queued_tokens() == 0


def test_one_that_is_alone_in_a_full_pool_waits_for_its_tokens_in_flight_before_it_ends() -> None:
    stepper = Stepper(num_blocks=2)
    stepper.add("alone", 7)
    stepper.samples["alone"] = [ORDINARY_TOKEN, STOP_TOKEN]
    first, second = stepper.plan(), stepper.plan()
    assert stepper.plan().is_empty
    stepper.settle(first)
    stepper.settle(second)
    assert stepper.ends["alone"].finish_reason == "stop"


def test_one_that_is_alone_waits_for_the_blocks_of_those_who_ended_while_a_step_reads_them() -> None:
    stepper = Stepper(policy="default", num_blocks=4)
    stepper.add("alone", 7, max_tokens=9)
    stepper.steps(2)
    stepper.add("ended", 7)
    prefill = stepper.plan()
    stepper.abort("ended")
    assert stepper.plan().is_empty
    stepper.settle(prefill)
    stepper.run_to_end()
    assert stepper.num_output_tokens("alone") == 9


def test_steps_are_settled_in_the_order_in_which_they_were_planned() -> None:
    stepper = Stepper()
    stepper.add("answer", 5)
    stepper.plan()
    second = stepper.plan()
    with pytest.raises(AssertionError, match="order"):
        stepper.settle(second)


def test_a_scheduler_that_runs_nothing_twice_in_a_row_says_so_loudly() -> None:
    stepper = Stepper(num_blocks=4)
    stepper.add("starved", 5)
    # Somebody holds blocks whom the scheduler does not know.
    stepper.blocks.allocate([TableRequest(-1, 16)])
    stepper.plan()
    with pytest.raises(SchedulerStuckError, match="two steps in a row ran nothing"):
        stepper.plan()


def test_an_empty_plan_is_not_in_flight() -> None:
    stepper = Stepper()
    assert stepper.plan().is_empty
    assert not stepper.scheduler.has_unfinished()
    stepper.add("answer", 5, max_tokens=1)
    stepper.run_to_end()


def test_records_say_how_long_each_step_took() -> None:
    stepper = Stepper()
    stepper.add("answer", 5)
    planned = stepper.plan()
    assert stepper.scheduler.records.newest.duration_s is None
    stepper.plan()
    stepper.settle(planned)
    first = stepper.scheduler.records.since(0)[0]
    assert first.duration_s == pytest.approx(0.01)
