"""Questions to workers for explanations: one that hangs takes its time once, however many requests are asked for."""

import asyncio
import time
from typing import Any

import pytest

from deployments.explain import journeys as journeys_module
from deployments.explain.journeys import Journeys, parsed
from deployments.explain.push import ExplanationPusher
from deployments.frames import Accepted
from deployments.keys import Caller
from scheduler.life_report import LifeReport

TIMEOUT_S = 0.1
NUM_REQUESTS = 20


@pytest.fixture(autouse=True)
def short_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journeys_module, "ASK_TIMEOUT_S", TIMEOUT_S)


async def hangs(request_id: str, replica_id: str) -> LifeReport | None:
    await asyncio.Event().wait()
    raise AssertionError("it never answers")


def under_way(count: int) -> Journeys:
    """So many prompts of the call `call`, each running on the worker that hangs."""
    journeys = Journeys(hangs)
    for number in range(count):
        journey = journeys.begin(f"call-{number}", time.monotonic(), 7, Caller())
        journey.sent(f"call-{number}")
        journey.asked()
        journey.received([Accepted(0, "stuck")])
        assert journey.lacks_life
    return journeys


def test_the_prompts_of_one_call_are_asked_for_at_once() -> None:
    async def scenario() -> None:
        began_s = time.monotonic()
        found = await under_way(NUM_REQUESTS).find("call")
        assert time.monotonic() - began_s < 5 * TIMEOUT_S
        assert sorted(e["id"] for e in found) == sorted(f"call-{number}" for number in range(NUM_REQUESTS))
        assert all(parsed(e)["workers"] for e in found)

    asyncio.run(scenario())


def test_prompts_that_are_ending_and_prompts_that_go_on_are_told_together() -> None:
    async def scenario() -> list[str]:
        journeys = under_way(2)
        journeys.end(journeys.of("call-0"), "stop")
        return sorted(e["id"] for e in await journeys.find("call"))

    assert asyncio.run(scenario()) == ["call-0", "call-1"]


class Method:
    def __init__(self, calls: list[tuple[Any, ...]], result: Any) -> None:
        self._calls, self._result = calls, result

    async def remote(self, *args: Any) -> Any:
        self._calls.append(args)
        return self._result


class Actor:
    """The metrics actor, which was asked for requests of this ingress by others."""

    def __init__(self, wanted: list[str]) -> None:
        self.answers: list[tuple[Any, ...]] = []
        self.put_explanations = Method([], wanted)
        self.answer_explanation = Method(self.answers, None)


def test_requests_that_others_ask_for_do_not_wait_for_each_other() -> None:
    """The ingress's metrics are pushed in the same turn: they must not be late."""
    wanted = [f"call-{number}" for number in range(NUM_REQUESTS)]

    async def scenario() -> Actor:
        actor = Actor(wanted)
        began_s = time.monotonic()
        await ExplanationPusher(actor, "ingress", under_way(NUM_REQUESTS)).push()
        assert time.monotonic() - began_s < 5 * TIMEOUT_S
        return actor

    assert sorted(answer[0] for answer in asyncio.run(scenario()).answers) == sorted(wanted)
