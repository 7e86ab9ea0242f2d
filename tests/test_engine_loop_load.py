"""The engine's load as others see it while a step is long."""

import threading
from dataclasses import replace

import pytest

from scheduler.limits import LimitError
from tests.steppable_engine import request, running, wait_until

TIMEOUT_S = 10.0


class Gates:
    """Each of the first two steps says that it runs, then waits to be let go, before it plans anything."""

    def __init__(self) -> None:
        self.runs = {1: threading.Event(), 2: threading.Event()}
        self.may_go = {1: threading.Event(), 2: threading.Event()}

    def before_step(self, number: int) -> None:
        if number in self.runs:
            self.runs[number].set()
            self.may_go[number].wait(TIMEOUT_S)


def test_what_came_and_went_between_two_steps_shows_before_the_second_has_ended() -> None:
    gates = Gates()
    with running(gates.before_step) as run:
        run.loop.submit(request("gone", max_tokens=20))
        assert gates.runs[1].wait(TIMEOUT_S)
        assert run.loop.status().load.num_waiting == 1
        run.loop.submit(request("new", max_tokens=20))
        run.loop.abort("gone")
        gates.may_go[1].set()
        assert gates.runs[2].wait(TIMEOUT_S)
        load = run.loop.status().load
        assert (load.num_waiting, load.num_running, load.num_used_blocks) == (1, 0, 0)
        gates.may_go[2].set()
        run.mailbox.wait_for_end("new")
        wait_until(lambda: run.loop.status().load.num_running == 0)


def test_a_burst_that_comes_during_one_step_shows_in_the_load_at_once_and_only_once() -> None:
    gates = Gates()
    with running(gates.before_step) as run:
        run.loop.submit(request("first", num_prompt_tokens=6, max_tokens=2))
        assert gates.runs[1].wait(TIMEOUT_S)
        for number in range(5):
            run.loop.submit(request(f"burst{number}", num_prompt_tokens=7, max_tokens=2))
        load = run.loop.status().load
        assert (load.num_waiting, load.num_queued_tokens) == (6, 6 + 5 * 7)
        gates.may_go[1].set()
        assert gates.runs[2].wait(TIMEOUT_S)
        load = run.loop.status().load
        assert (load.num_waiting + load.num_running, load.num_queued_tokens) == (6, 5 * 7)
        gates.may_go[2].set()
        for number in range(5):
            run.mailbox.wait_for_end(f"burst{number}")
        wait_until(lambda: run.loop.status().load.num_running == 0)
        assert run.loop.status().load.num_queued_tokens == 0


def test_limits_change_between_two_steps_and_bad_ones_change_nothing() -> None:
    gates = Gates()
    with running(gates.before_step) as run:
        before = run.loop.limits
        run.loop.submit(request("a", max_tokens=30))
        assert gates.runs[1].wait(TIMEOUT_S)
        with pytest.raises(LimitError, match="max_num_seqs"):
            run.loop.set_limits(replace(before, max_num_seqs=before.max_num_seqs + 1))
        assert run.loop.limits == before
        run.loop.set_limits(replace(before, max_num_seqs=3))
        assert run.loop.limits.max_num_seqs == 3
        assert run.engine.scheduler.limits == before
        gates.may_go[1].set()
        assert gates.runs[2].wait(TIMEOUT_S)
        assert run.engine.scheduler.limits.max_num_seqs == 3
        gates.may_go[2].set()
        assert run.mailbox.wait_for_end("a").finish_reason == "length"
