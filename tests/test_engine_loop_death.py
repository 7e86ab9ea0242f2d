"""How the engine's thread dies and stops, and what it says of a step that hangs."""

import threading
import time

import pytest

from kv_cache import TableRequest
from tests.steppable_engine import Running, SteppableEngine, request, running, slowly, wait_until
from worker.types import TokenEvent

LONG = 50


def test_a_step_that_raises_ends_every_open_request_with_an_error_and_reports_the_death_once() -> None:
    def fail_late(number: int) -> None:
        if number == 4:
            raise RuntimeError("out of order")

    with running(fail_late) as run:
        for number in range(3):
            run.loop.submit(request(f"r{number}", max_tokens=LONG))
        for number in range(3):
            end = run.mailbox.wait_for_end(f"r{number}")
            assert end.finish_reason == "error"
            assert end.error is not None
            assert "out of order" in end.error
            assert not end.is_refusal
        assert run.died.wait(10.0)
        assert [str(error) for error in run.deaths] == ["out of order"]
        status = run.loop.status()
        assert not status.alive
        assert status.error is not None
        assert "out of order" in status.error
        assert status.step_age_s == 0.0


def test_requests_that_were_queued_but_not_yet_taken_in_end_with_the_loop_too() -> None:
    entered, gate = threading.Event(), threading.Event()

    def hang_and_fail(number: int) -> None:
        entered.set()
        gate.wait(10.0)
        raise RuntimeError("broken")

    with running(hang_and_fail) as run:
        run.loop.submit(request("taken"))
        assert entered.wait(10.0)
        run.loop.submit(request("queued"))
        gate.set()
        assert run.mailbox.wait_for_end("taken").finish_reason == "error"
        assert run.mailbox.wait_for_end("queued").finish_reason == "error"


def test_a_request_to_a_dead_loop_ends_at_once_with_the_cause() -> None:
    def fail(number: int) -> None:
        raise RuntimeError("broken")

    with running(fail) as run:
        run.loop.submit(request("first"))
        assert run.died.wait(10.0)
        run.loop.submit(request("late"))
        (event,) = run.mailbox.events("late")
        assert event.finish_reason == "error"
        assert event.error is not None
        assert "broken" in event.error
        run.loop.abort("first")
        run.loop.finish("late", 0, 0)
        assert len(run.deaths) == 1


def test_a_delivery_that_raises_kills_the_loop_and_still_reports_its_death() -> None:
    ended: list[object] = []

    def deliver(events: list[TokenEvent]) -> None:
        raise RuntimeError("nobody listens")

    run = Running(SteppableEngine(), deliver)
    # The thread of the loop ends with the second failure, which is the test's to look at.
    hook, threading.excepthook = threading.excepthook, ended.append
    try:
        run.loop.start()
        run.loop.submit(request("a"))
        assert run.died.wait(10.0)
        run.loop.stop(10.0)
    finally:
        threading.excepthook = hook
    assert len(run.deaths) == len(ended) == 1
    assert not run.loop.status().alive


def test_the_age_of_a_step_that_hangs_grows_in_the_status() -> None:
    entered, gate = threading.Event(), threading.Event()

    def hang(number: int) -> None:
        entered.set()
        gate.wait(10.0)

    with running(hang) as run:
        assert run.loop.status().step_age_s == 0.0
        run.loop.submit(request("a", max_tokens=1))
        assert entered.wait(10.0)
        wait_until(lambda: run.loop.status().step_age_s >= 0.05)
        assert run.loop.status().alive
        gate.set()
        run.mailbox.wait_for_end("a")
        wait_until(lambda: run.loop.status().step_age_s == 0.0)
        assert run.loop.status().step_id == 1


def test_stop_returns_within_its_timeout_while_a_step_hangs_and_the_thread_ends_after_it() -> None:
    entered, gate = threading.Event(), threading.Event()

    def hang(number: int) -> None:
        entered.set()
        gate.wait(10.0)

    with running(hang) as run:
        run.loop.submit(request("a", max_tokens=LONG))
        assert entered.wait(10.0)
        began_s = time.monotonic()
        run.loop.stop(0.1)
        assert 0.1 <= time.monotonic() - began_s < 2.0
        assert run.loop.status().alive
        gate.set()
        wait_until(lambda: not run.loop.status().alive)
        assert run.engine.num_steps == 1


@pytest.mark.parametrize("is_busy", [False, True])
def test_stop_ends_the_thread_at_once_and_later_requests_are_turned_away(is_busy: bool) -> None:
    with running(slowly) as run:
        if is_busy:
            run.loop.submit(request("a", max_tokens=LONG))
            run.mailbox.wait_for_tokens("a", 1)
        began_s = time.monotonic()
        run.loop.stop(10.0)
        assert time.monotonic() - began_s < 0.9, "an idle loop waits for its next look at the books"
        assert not run.loop.status().alive
        assert run.deaths == []
        run.loop.submit(request("late"))
        assert run.mailbox.wait_for_end("late").error == "the engine is stopping"


def test_an_idle_engine_looks_after_its_books_and_dies_loudly_when_they_are_wrong() -> None:
    with running() as run:
        run.loop.submit(request("a", max_tokens=2))
        run.mailbox.wait_for_end("a")
        wait_until(lambda: run.engine.num_integrity_checks > 0)
        run.engine.stepper.blocks.allocate([TableRequest(-1, 4)])
        run.loop.abort("unknown")
        assert run.died.wait(10.0)
        assert isinstance(run.deaths[0], AssertionError)
