"""How much may wait at a worker, and what one that is turned away is told."""

import pytest

from deployments.worker_queue import MAX_RETRY_AFTER_S, MIN_RETRY_AFTER_S, QueueLimits, WorkerQueue
from worker.types import EngineLoad

TICK_S = 0.25


def load(*, num_queued_tokens: int = 0, num_waiting: int = 0) -> EngineLoad:
    return EngineLoad(num_waiting, 1, 0, num_queued_tokens, 10, 1)


def queue(max_queued_tokens: int = 0, max_queued_requests: int = 0) -> WorkerQueue:
    return WorkerQueue(QueueLimits(max_queued_tokens, max_queued_requests))


def busy_queue(tokens_per_s: float, max_queued_tokens: int = 0, max_queued_requests: int = 0) -> WorkerQueue:
    """Its backlog has shrunk by so many tokens a second for ten seconds."""
    busy = queue(max_queued_tokens, max_queued_requests)
    num_left = 100_000.0
    busy.took(int(num_left))
    for tick in range(40):
        busy.observe(tick * TICK_S, load(num_queued_tokens=int(num_left), num_waiting=9))
        num_left -= tokens_per_s * TICK_S
    return busy


@pytest.mark.parametrize(
    ("num_queued_tokens", "num_tokens", "comes_in"),
    [(0, 50, True), (0, 500, True), (60, 40, True), (60, 41, False), (100, 1, False), (1, 500, False)],
)
def test_the_newcomers_tokens_count_unless_the_queue_is_empty(
    num_queued_tokens: int, num_tokens: int, comes_in: bool
) -> None:
    wait_s = queue(max_queued_tokens=100).retry_after_s(num_tokens, load(num_queued_tokens=num_queued_tokens))
    assert (wait_s is None) == comes_in


def test_waiting_requests_are_counted_by_themselves() -> None:
    limited = queue(max_queued_requests=2)
    assert limited.retry_after_s(5, load(num_queued_tokens=5, num_waiting=1)) is None
    assert limited.retry_after_s(5, load(num_queued_tokens=10, num_waiting=2)) is not None
    # Prompts that the prefix cache has in full wait without a token to compute.
    assert limited.retry_after_s(5, load(num_queued_tokens=0, num_waiting=2)) == MIN_RETRY_AFTER_S


def test_zero_is_no_limit() -> None:
    assert queue().retry_after_s(10**6, load(num_queued_tokens=10**9, num_waiting=10**6)) is None


def test_the_wait_is_what_has_to_leave_the_queue_over_the_rate_at_which_it_shrinks() -> None:
    busy = busy_queue(1000.0, max_queued_tokens=10_000)
    assert busy.tokens_per_s == pytest.approx(1000, rel=0.01)
    assert busy.retry_after_s(2000, load(num_queued_tokens=12_000)) == pytest.approx(4.0, rel=0.02)
    # A prompt over the limit needs an empty queue, and no more than that.
    assert busy.retry_after_s(50_000, load(num_queued_tokens=3000)) == pytest.approx(3.0, rel=0.02)


def test_the_wait_for_a_place_in_the_queue_is_the_share_of_the_backlog_before_it() -> None:
    busy = busy_queue(1000.0, max_queued_requests=8)
    assert busy.retry_after_s(1, load(num_queued_tokens=20_000, num_waiting=10)) == pytest.approx(6.0, rel=0.02)


def test_a_wait_has_bounds_and_needs_no_measured_rate() -> None:
    assert queue(100).retry_after_s(10, load(num_queued_tokens=100)) == MIN_RETRY_AFTER_S
    assert busy_queue(1e6, 100).retry_after_s(10, load(num_queued_tokens=100)) == MIN_RETRY_AFTER_S
    assert busy_queue(1.0, 100).retry_after_s(10, load(num_queued_tokens=9000)) == MAX_RETRY_AFTER_S


def test_an_idle_spell_does_not_change_the_rate_of_a_busy_one() -> None:
    seen = queue()
    seen.took(2000)
    for tick in range(9):
        seen.observe(tick * TICK_S, load(num_queued_tokens=2000 - tick * 250))
    rate = seen.tokens_per_s
    assert rate == pytest.approx(1000)
    for tick in range(9, 200):
        seen.observe(tick * TICK_S, load())
    assert seen.tokens_per_s == rate
    assert seen.done_tokens_per_s < 1.0


def test_tokens_that_preemption_puts_back_into_the_queue_are_no_negative_rate() -> None:
    seen = queue()
    seen.took(100)
    seen.observe(0.0, load(num_queued_tokens=100))
    seen.observe(1.0, load(num_queued_tokens=400))
    assert seen.tokens_per_s == 0.0
    assert seen.done_tokens_per_s == 0.0


def test_limits_may_change_at_any_time() -> None:
    changed = queue(max_queued_tokens=100)
    full = load(num_queued_tokens=90)
    assert changed.retry_after_s(20, full) is not None
    changed.limits = QueueLimits(200, 0)
    assert changed.retry_after_s(20, full) is None


def stuck_queue(seconds: float, max_queued_tokens: int = 0, max_queued_requests: int = 0) -> WorkerQueue:
    """Eleven came at once, eight found a slot, and nothing has left since."""
    stuck = queue(max_queued_tokens, max_queued_requests)
    stuck.observe(0.0, load())
    for _ in range(11):
        stuck.took(10)
    for tick in range(1, int(seconds / TICK_S) + 2):
        stuck.observe(tick * TICK_S, load(num_queued_tokens=30, num_waiting=3))
    return stuck


def test_while_no_slot_gets_free_the_wait_is_no_less_than_the_time_that_nothing_has_left() -> None:
    full = load(num_queued_tokens=30, num_waiting=3)
    for limits in ((0, 3), (30, 0)):
        assert stuck_queue(0.0, *limits).retry_after_s(10, full) == MIN_RETRY_AFTER_S
        assert stuck_queue(6.0, *limits).retry_after_s(10, full) == pytest.approx(6.0)
        assert stuck_queue(90.0, *limits).retry_after_s(10, full) == MAX_RETRY_AFTER_S


def test_once_an_admission_was_waited_for_the_next_one_is_foreseen_from_it() -> None:
    full = load(num_queued_tokens=30, num_waiting=3)
    seen = stuck_queue(11.75, max_queued_requests=3)
    seen.observe(12.25, load(num_queued_tokens=10, num_waiting=1))
    seen.took(10)
    seen.took(10)
    seen.observe(12.5, full)
    assert seen.retry_after_s(10, full) == pytest.approx(12.0)
    # Two left at once, so that four more take two such waits.
    assert seen.retry_after_s(10, load(num_queued_tokens=60, num_waiting=6)) == pytest.approx(24.0)


def test_neither_a_preempted_answer_nor_a_newcomer_on_its_way_counts_as_an_admission() -> None:
    full = load(num_queued_tokens=30, num_waiting=3)
    seen = stuck_queue(4.0, max_queued_requests=3)
    seen.observe(4.5, load(num_queued_tokens=90, num_waiting=4))
    seen.took(10)
    seen.observe(4.75, full)
    assert seen.retry_after_s(10, full) == pytest.approx(4.5)


def test_quick_admissions_are_soon_believed() -> None:
    seen = stuck_queue(11.75, max_queued_requests=3)
    for tick in range(49, 200):
        seen.observe(tick * TICK_S, load(num_queued_tokens=20, num_waiting=2))
        seen.took(10)
    assert seen.retry_after_s(10, load(num_queued_tokens=30, num_waiting=3)) == MIN_RETRY_AFTER_S
