"""Order `priority`: urgent requests go first, and take the place of running ones of a lower class when all is full."""

from random import Random

import pytest

from scheduler.records import WaitReason
from tests.scheduling import STEP_S, Stepper, chunk_sizes, victims

POLICIES = pytest.mark.parametrize("policy", ["default", "chunked_prefill"])
MODES = pytest.mark.parametrize("mode", ["recompute", "swap", "auto"])


def full_engine(rng: Random, policy: str, mode: str, what: str) -> Stepper:
    """Answers of class 1 that fill all slots, or of which there are so many that blocks run short."""
    max_num_seqs, num_blocks = (6, 400) if what == "slots" else (12, 44)
    stepper = Stepper(
        policy=policy,
        mode=mode,
        order="priority",
        budget=100,
        max_num_seqs=max_num_seqs,
        max_model_len=80,
        num_blocks=num_blocks,
        num_host_blocks=rng.choice([0, 10, 200]),
        priority_aging_s=1000.0,
    )
    for number in range(20):
        n = rng.choice([1, 1, 2, 3])
        stepper.add(f"r{number}", rng.randint(1, 20), max_tokens=rng.randint(20, 50), n=n, priority=1)
    stepper.steps(rng.randint(2, 15))
    return stepper


@POLICIES
@MODES
@pytest.mark.parametrize("what", ["slots", "blocks"])
@pytest.mark.parametrize("seed", range(8))
def test_an_urgent_request_at_a_full_engine_starts_within_two_steps_and_its_victims_come_back_after_it(
    policy: str, mode: str, what: str, seed: int
) -> None:
    rng = Random(seed)
    stepper = full_engine(rng, policy, mode, what)
    arrived = stepper.scheduler.records.newest.step_id
    urgent = stepper.add("urgent", rng.randint(1, 60), max_tokens=4, n=rng.randint(1, 3), priority=0)
    preempted: set[str] = set()
    while "urgent" in stepper.waiting:
        record = stepper.step()
        if "urgent" not in record.admitted:
            assert not preempted & {*record.resumed, *record.admitted}, "a victim came back first"
        preempted |= {victim for victim, _ in victims(record)}
        assert stepper.scheduler.records.newest.step_id <= arrived + 2, "it did not start within two steps"
    assert all(seq.num_output_tokens or seq.num_computed_tokens for seq in urgent.live)
    stepper.run_to_end()
    assert {stepper.num_output_tokens("urgent", index) for index in range(len(urgent.sequences))} == {4}


@POLICIES
def test_a_victim_is_not_brought_back_before_the_urgent_one_even_if_its_place_becomes_free(policy: str) -> None:
    stepper = Stepper(policy=policy, mode="swap", order="priority", max_num_seqs=2, num_host_blocks=50)
    stepper.add("a", 10, priority=1)
    stepper.add("b", 10, priority=1)
    stepper.steps(2)
    stepper.add("urgent", 10, max_tokens=3, priority=0)
    preempting = stepper.step()
    assert victims(preempting) == [("b", "swap")]
    assert preempting.preemptions[0].reason == "priority"
    assert preempting.preemptions[0].beneficiary == "urgent"
    stepper.finish("a")
    record = stepper.step()
    assert record.admitted == ["urgent"]
    assert record.resumed == ([] if policy == "default" else ["b"]) or record.swapped_reason is not None
    stepper.run_to_end(max_steps=60)


@POLICIES
@MODES
def test_requests_of_one_class_never_throw_each_other_out_for_slots(policy: str, mode: str) -> None:
    stepper = Stepper(policy=policy, mode=mode, order="priority", max_num_seqs=2, num_host_blocks=50)
    for number in range(8):
        stepper.add(f"r{number}", 10, max_tokens=6, priority=3)
        stepper.step()
    records = stepper.scheduler.records.since(0) + stepper.run_to_end()
    assert not any(record.preemptions for record in records)
    admitted = [request_id for record in stepper.scheduler.records.since(0) for request_id in record.admitted]
    assert admitted == [f"r{number}" for number in range(8)]


@POLICIES
@MODES
@pytest.mark.parametrize("seed", range(4))
def test_a_class_never_preempts_its_own_or_a_more_urgent_one_for_the_sake_of_coming_in(
    policy: str, mode: str, seed: int
) -> None:
    rng = Random(seed)
    stepper = Stepper(
        policy=policy, mode=mode, order="priority", max_num_seqs=5, num_blocks=60, num_host_blocks=40, budget=80
    )
    num_preempted = 0
    for number in range(60):
        stepper.add(f"r{number}", rng.randint(1, 30), max_tokens=rng.randint(2, 20), priority=rng.randrange(3))
        for preemption in stepper.step().preemptions:
            if preemption.reason == "priority" or preemption.beneficiary not in stepper.running:
                num_preempted += 1
                victim, beneficiary = (stepper.groups[name] for name in (preemption.victim, preemption.beneficiary))
                assert victim.priority > beneficiary.priority or victim is beneficiary
    assert num_preempted > 3
    stepper.run_to_end()


def test_nobody_is_thrown_out_where_all_victims_together_would_not_make_room() -> None:
    stepper = Stepper(order="priority", max_num_seqs=3)
    stepper.add("equal", 10, n=2, priority=0)
    stepper.add("lower", 10, priority=1)
    stepper.step()
    stepper.add("urgent", 10, n=2, priority=0)
    record = stepper.step()
    assert record.preemptions == []
    assert record.waiting_reason is WaitReason.SEQUENCE_SLOTS


def test_victims_are_the_lowest_class_first_then_the_newest() -> None:
    stepper = Stepper(mode="swap", order="priority", max_num_seqs=4, num_host_blocks=50)
    for request_id, priority in (("a", 1), ("lowest", 2), ("b", 1), ("c", 0)):
        stepper.add(request_id, 5, priority=priority)
    stepper.steps(2)
    thrown_out: list[str] = []
    for number in range(4):
        stepper.add(f"urgent{number}", 5, priority=0)
        for record in stepper.steps(2):
            thrown_out += [victim for victim, _ in victims(record)]
    assert thrown_out == ["lowest", "b", "a"]


@POLICIES
def test_blocks_are_taken_from_the_lowest_class_first(policy: str) -> None:
    stepper = Stepper(policy=policy, order="priority", num_blocks=6)
    stepper.add("lower", 7, priority=1)
    stepper.add("newer", 7, priority=0)
    stepper.add("newest", 7, priority=0)
    *_, record = stepper.steps(3)
    assert victims(record) == [("lower", "recompute")]


def test_an_urgent_request_goes_before_all_that_wait() -> None:
    stepper = Stepper(order="priority", max_num_seqs=1, budget=64)
    stepper.add("running", 10, max_tokens=3, priority=-1)
    stepper.step()
    for request_id, priority in (("low", 2), ("normal", 1), ("urgent", 0), ("also urgent", 0)):
        stepper.add(request_id, 10, max_tokens=1, priority=priority)
    admitted = [request_id for record in stepper.run_to_end() for request_id in record.admitted]
    assert admitted == ["urgent", "also urgent", "normal", "low"]


@POLICIES
def test_aging_bounds_how_long_urgent_requests_can_hold_up_a_lower_one(policy: str) -> None:
    """A request that is one class lower waits for `priority_aging_s` at most behind a stream of more urgent ones."""
    aging_s = 40 * STEP_S
    stepper = Stepper(policy=policy, order="priority", max_num_seqs=1, priority_aging_s=aging_s)
    stepper.add("first", 5, max_tokens=4, priority=0)
    stepper.step()
    stepper.add("lower", 5, max_tokens=1, priority=1)
    num_steps = 0
    while "lower" not in stepper.ends:
        stepper.add(f"urgent{num_steps}", 5, max_tokens=4, priority=0)
        stepper.step()
        num_steps += 1
        assert num_steps <= 40 * 4 + 8
    # Those that came within the aging time went first, and none of those that came later.
    came_before = [name for name, end in stepper.ends.items() if name.startswith("urgent") and end]
    assert len(came_before) == pytest.approx(40, abs=1)


def test_a_group_that_aged_past_an_urgent_one_is_not_its_victim() -> None:
    stepper = Stepper(order="priority", max_num_seqs=1, priority_aging_s=5 * STEP_S)
    stepper.add("old", 5, priority=1)
    stepper.steps(10)
    stepper.add("urgent", 5, max_tokens=1, priority=0)
    record = stepper.step()
    assert record.preemptions == []
    assert record.waiting_reason is WaitReason.SEQUENCE_SLOTS


@pytest.mark.parametrize("long_prefill_threshold", [0, 200])
def test_an_urgent_prompt_takes_the_budget_before_a_lower_one_that_is_midway(long_prefill_threshold: int) -> None:
    stepper = Stepper(
        order="priority", budget=64, max_model_len=4000, long_prefill_threshold=long_prefill_threshold
    )
    stepper.add("lower", 3000, priority=1)
    stepper.steps(2)
    stepper.add("equal", 300, priority=1)
    stepper.add("urgent", 300, max_tokens=1, priority=0)
    records = stepper.steps(5)
    assert [chunk_sizes(record) for record in records] == [{"urgent": 64}] * 4 + [{"urgent": 44, "lower": 20}]
    assert stepper.waiting == ["equal"]


def test_under_first_come_first_served_nobody_is_urgent() -> None:
    stepper = Stepper(max_num_seqs=1)
    stepper.add("running", 5, max_tokens=5, priority=9)
    stepper.step()
    stepper.add("urgent", 5, priority=0)
    assert not any(record.preemptions or record.admitted for record in stepper.steps(3))


def test_a_swapped_victim_that_is_cancelled_and_an_urgent_one_that_is_cancelled_hold_up_nobody() -> None:
    for cancelled in ("victim", "urgent"):
        stepper = Stepper(mode="swap", order="priority", max_num_seqs=1, num_host_blocks=50)
        stepper.add("victim", 5, max_tokens=9, priority=1)
        stepper.steps(2)
        stepper.add("urgent", 5, max_tokens=9, priority=0)
        stepper.step()
        assert stepper.swapped == ["victim"]
        stepper.abort(cancelled)
        stepper.run_to_end(max_steps=12)
