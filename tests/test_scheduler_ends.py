"""How a request ends in the scheduler: stop token, length, context, a pool that it outgrew."""

import pytest

from scheduler import RequestTooLargeError
from tests.scheduling import ORDINARY_TOKEN, STOP_TOKEN, Stepper

POLICIES = pytest.mark.parametrize("policy", ["default", "chunked_prefill"])
MODES = pytest.mark.parametrize("mode", ["recompute", "swap"])


def test_an_answer_ends_with_its_stop_token_but_not_before_min_tokens() -> None:
    stepper = Stepper()
    stepper.add("stops", 5)
    stepper.add("goes on", 5, max_tokens=4, min_tokens=2)
    stepper.samples["stops"] = [ORDINARY_TOKEN, STOP_TOKEN]
    stepper.samples["goes on"] = [STOP_TOKEN, STOP_TOKEN, ORDINARY_TOKEN]
    stepper.run_to_end()
    assert (stepper.ends["stops"].finish_reason, stepper.num_output_tokens("stops")) == ("stop", 2)
    assert (stepper.ends["goes on"].finish_reason, stepper.num_output_tokens("goes on")) == ("length", 4)


def test_a_prompt_one_short_of_the_context_gets_one_token_and_a_longer_one_is_refused() -> None:
    stepper = Stepper(max_model_len=64)
    stepper.add("fits", 63)
    for num_tokens in (64, 65):
        with pytest.raises(RequestTooLargeError, match=f"has {num_tokens} tokens; at most 63"):
            stepper.add("too long", num_tokens)
    stepper.run_to_end()
    assert (stepper.ends["fits"].finish_reason, stepper.num_output_tokens("fits")) == ("length", 1)


@POLICIES
@MODES
def test_a_group_that_is_alone_and_cannot_grow_ends_with_length(policy: str, mode: str) -> None:
    stepper = Stepper(policy=policy, mode=mode, num_blocks=3, num_host_blocks=8)
    stepper.add("alone", 7)
    records = stepper.run_to_end()
    # 12 tokens fill the pool; the token that they sample is still delivered.
    assert stepper.num_output_tokens("alone") == 13 - 7
    assert stepper.ends["alone"].finish_reason == "length"
    assert records[-1].ended == ["alone"]


def test_one_that_is_alone_and_full_lets_the_next_one_in_at_once() -> None:
    stepper = Stepper(num_blocks=3)
    stepper.add("alone", 11)
    stepper.steps(2)
    stepper.add("next", 11, max_tokens=1)
    stepper.run_to_end(max_steps=3)
    assert {end.finish_reason for end in stepper.ends.values()} == {"length"}
    assert stepper.num_output_tokens("next") == 1


@POLICIES
@pytest.mark.parametrize("num_host_blocks", [0, 8])
def test_a_preempted_one_that_outgrew_the_pool_ends_with_length(policy: str, num_host_blocks: int) -> None:
    stepper = Stepper(policy=policy, mode="swap", num_blocks=4, num_host_blocks=num_host_blocks)
    stepper.add("old", 3, max_tokens=3)
    stepper.add("large", 12)
    stepper.steps(2)
    assert stepper.num_output_tokens("large") >= 1
    stepper.run_to_end()
    # 16 tokens fit, and the seventeenth is what they sample: as undisturbed.
    assert stepper.num_output_tokens("large") == 17 - 12
    assert stepper.ends["large"].finish_reason == "length"


def grow_in_queue(stepper: Stepper, request_id: str, num_tokens: int) -> None:
    """As if steps in flight had brought it many tokens at once."""
    group = stepper.groups[request_id]
    queues = stepper.scheduler.queues
    leave, enter = (queues.stop_waiting, queues.wait) if request_id in stepper.waiting else (queues.unpark, queues.park)
    leave(group)
    group.sequences[0].token_ids += [5] * num_tokens
    enter(group)


@POLICIES
@MODES
def test_what_grew_past_the_whole_pool_ends_with_length_and_stops_nobody(policy: str, mode: str) -> None:
    stepper = Stepper(policy=policy, mode=mode, num_blocks=4, num_host_blocks=8)
    stepper.add("old", 7)
    stepper.add("new", 7)
    stepper.steps(3)
    assert stepper.running == ["old"]
    stepper.add("next", 3, max_tokens=2)
    grow_in_queue(stepper, "new", 10)
    stepper.finish("old")
    record = stepper.step()
    assert record.ended == ["new"]
    assert stepper.ends["new"].finish_reason == "length"
    stepper.run_to_end()
    assert stepper.ends["next"].finish_reason == "length"
    assert stepper.num_output_tokens("next") == 2


@POLICIES
def test_a_prompt_that_can_never_fit_ends_alone_with_an_error_to_read(policy: str) -> None:
    stepper = Stepper(policy=policy, num_blocks=4)
    stepper.add("never", 15)
    grow_in_queue(stepper, "never", 2)
    stepper.groups["never"].sequences[0].num_prompt_tokens = 17
    stepper.add("next", 3, max_tokens=1)
    record = stepper.step()
    assert record.ended == ["never"]
    assert stepper.ends["never"].finish_reason == "error"
    assert "needs 5 cache blocks, but there are 4" in (stepper.ends["never"].error or "")
    assert record.admitted == ["next"]
