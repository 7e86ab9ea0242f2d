"""Whether any worker would serve a request now, whatever the others do."""

import asyncio
import time
from collections.abc import Callable
from typing import Any

import pytest

from deployments import readiness
from deployments.readiness import ReadyProbe


class Workers:
    """`conditions` by id: `well`, `slow`, `stuck` (never answers) or `broken` (raises)."""

    def __init__(self, **conditions: str) -> None:
        self.conditions = conditions
        self.asked: list[str] = []
        self.cancelled: list[str] = []

    def ids(self) -> list[str]:
        return list(self.conditions)

    async def ask(self, worker_id: str) -> None:
        self.asked.append(worker_id)
        condition = self.conditions[worker_id]
        try:
            if condition == "stuck":
                await asyncio.Event().wait()
            if condition == "slow":
                await asyncio.sleep(0.05)
            if condition == "broken":
                raise RuntimeError("the engine loop is dead")
        except asyncio.CancelledError:
            self.cancelled.append(worker_id)
            raise


def run(workers: Workers, work: Callable[[ReadyProbe], Any], keep_s: float = 0.0) -> Any:
    async def main() -> Any:
        return await work(ReadyProbe(workers.ids, workers.ask, keep_s))

    return asyncio.run(main())


@pytest.mark.parametrize(
    ("conditions", "is_ready"),
    [
        (["well"], True),
        (["broken"], False),
        ([], False),
        (["broken", "well"], True),
        (["stuck", "stuck", "stuck", "stuck", "slow"], True),
        (["broken", "broken", "broken", "broken", "well"], True),
    ],
)
def test_one_worker_that_is_well_among_any_number_is_enough(conditions: list[str], is_ready: bool) -> None:
    workers = Workers(**{f"w{number}": condition for number, condition in enumerate(conditions)})
    began_s = time.monotonic()
    assert run(workers, lambda probe: probe.is_ready()) is is_ready
    assert time.monotonic() - began_s < readiness.ANSWER_TIMEOUT_S / 2


def test_stuck_workers_make_it_unready_after_the_time_for_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readiness, "ANSWER_TIMEOUT_S", 0.05)
    workers = Workers(a="stuck", b="stuck")
    assert run(workers, lambda probe: probe.is_ready()) is False
    assert sorted(workers.cancelled) == ["a", "b"]


def test_calls_to_the_others_end_with_the_first_good_answer() -> None:
    workers = Workers(a="stuck", b="well")
    assert run(workers, lambda probe: probe.is_ready()) is True
    assert workers.cancelled == ["a"]


def test_many_who_ask_at_once_ask_each_worker_once() -> None:
    workers = Workers(a="slow", b="broken")

    async def ask_often(probe: ReadyProbe) -> list[bool]:
        return await asyncio.gather(*(probe.is_ready() for _ in range(50)))

    assert run(workers, ask_often) == [True] * 50
    assert sorted(workers.asked) == ["a", "b"]


def test_an_answer_is_kept_for_a_moment_and_then_asked_for_again() -> None:
    workers = Workers(a="well")

    async def ask_thrice(probe: ReadyProbe) -> list[bool]:
        answers = [await probe.is_ready()]
        workers.conditions["a"] = "broken"
        answers.append(await probe.is_ready())
        await asyncio.sleep(0.15)
        return [*answers, await probe.is_ready()]

    assert run(workers, ask_thrice, keep_s=0.1) == [True, True, False]


def test_one_who_stops_asking_does_not_disturb_the_others() -> None:
    workers = Workers(a="slow")

    async def leave_one(probe: ReadyProbe) -> bool:
        leaving, staying = asyncio.create_task(probe.is_ready()), asyncio.create_task(probe.is_ready())
        await asyncio.sleep(0.01)
        leaving.cancel()
        return await staying

    assert run(workers, leave_one) is True
