"""Drives a target open loop: each request leaves at its planned moment, however many are still open.

Time is the running event loop's, so that a test may run it on a virtual one. Knows nothing of what a target is.
"""

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from deployments.bench.loop_lag import LoopLag
from deployments.bench.requests import Answer, PlannedRequest
from deployments.bench.target import Target, TargetError

#: between the making of the plan and its first request
LEAD_S = 0.05
#: how often somebody looks at a run that is going on
WATCH_PERIOD_S = 0.2

#: is called with all answers during the run; a reason given ends it at once
Watch = Callable[[Sequence[Answer]], str | None]


@dataclass(slots=True)
class Run:
    """What one drive over the plan saw. `abandoned` says why it was ended before its end; None if it was not.
    `is_of_chats`: it was one of the scenario in `chats.py`."""

    target: str
    answers: list[Answer]
    started_s: float
    ended_s: float
    loop_lags_s: list[float]
    abandoned: str | None = None
    is_of_chats: bool = False

    @property
    def duration_s(self) -> float:
        return self.ended_s - self.started_s


async def drive(
    target: Target,
    plan: Sequence[PlannedRequest],
    *,
    run_number: int,
    timeout_s: float,
    watch: Watch = lambda answers: None,
) -> Run:
    """Sends the plan and waits for every answer to end. `timeout_s` counts from a request's intended start."""
    loop = asyncio.get_running_loop()
    started_s = loop.time() + LEAD_S
    answers = [Answer(request, started_s + request.arrival_s) for request in plan]
    abandoned: str | None = None
    async with LoopLag() as lag:
        sending = asyncio.create_task(_send_all(target, answers, run_number, timeout_s))
        try:
            while not sending.done() and abandoned is None:
                await asyncio.wait([sending], timeout=WATCH_PERIOD_S)
                abandoned = watch(answers)
        finally:
            if not sending.done():
                sending.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await sending
    ended = [answer.ended_s for answer in answers if answer.ended_s is not None]
    return Run(target.name, answers, started_s, max(ended, default=started_s), lag.lags_s, abandoned)


async def _send_all(target: Target, answers: Sequence[Answer], run_number: int, timeout_s: float) -> None:
    loop = asyncio.get_running_loop()
    async with asyncio.TaskGroup() as group:
        for answer in sorted(answers, key=lambda answer: answer.intended_s):
            # Awaited only when there is time left: a late client catches up without a detour.
            delay_s = answer.intended_s - loop.time()
            if delay_s > 0:
                await asyncio.sleep(delay_s)
            group.create_task(ask(target, answer, run_number, timeout_s))


async def ask(target: Target, answer: Answer, run_number: int, timeout_s: float) -> None:
    """Sends one request now and fills in what becomes of it; raises nothing that the target raised."""
    loop = asyncio.get_running_loop()
    answer.sent_s = loop.time()
    try:
        async with asyncio.timeout_at(answer.intended_s + timeout_s):
            await target.ask(answer, run_number)
    except TargetError as error:
        answer.error = str(error)
    except TimeoutError:
        answer.error = f"no end within {timeout_s:g} s"
    else:
        answer.ended_s = answer.delivery_times_s[-1] if answer.delivery_times_s else None
        answer.error = None if answer.delivery_times_s else "the answer held no token"
    # One that was cancelled gets here by no path: it is neither complete nor failed.
    if answer.error is not None:
        answer.ended_s = loop.time()
