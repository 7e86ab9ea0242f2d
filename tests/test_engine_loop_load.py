"""The engine's load as others see it while a step is long."""

import threading

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
