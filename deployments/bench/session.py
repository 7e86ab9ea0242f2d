"""The order of a benchmark: warm-up, one run for each rate, rounds over several targets, the capacity search.

Knows neither the command line nor how results are shown.
"""

import asyncio
import math
import statistics
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

from deployments.bench.capacity import Capacity, search_capacity
from deployments.bench.chats import ChatsWorkload, drive_chats
from deployments.bench.comparison import check_lengths
from deployments.bench.driver import Run, drive
from deployments.bench.loss_watch import LossWatch
from deployments.bench.requests import Answer, PlannedRequest
from deployments.bench.slo import Slo
from deployments.bench.summary import Summary, summarize
from deployments.bench.target import Target, TargetError
from deployments.bench.workloads import Workload

#: the lone request by which the pace of an idle target is measured
SOLO_INPUT_TOKENS = 128
SOLO_OUTPUT_TOKENS = 65
SOLO_REPEATS = 3
#: lets a target settle what an abandoned run left behind
PAUSE_S = 0.5
#: a target that answers this has left the run before behind it
SETTLED = PlannedRequest(0, 0.0, 8, 2)

#: called several times a second with what is running and the answers so far
Progress = Callable[[str, Sequence[Answer]], None]
#: called with the name of a target before it is asked anything, while nothing is asked
OnTurn = Callable[[str], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class SessionSettings:
    """`trial_s`: a trial of a search has at least the requests of so many seconds, if the workload has them."""

    workload: Workload
    slo: Slo
    num_requests: int | None
    timeout_s: float
    num_warm_up: int
    trial_s: float = 0.0
    precision: float = 0.05
    max_search_s: float = 600.0


@dataclass(slots=True)
class Measured:
    """One run and what it comes to."""

    run: Run
    summary: Summary


async def _nothing_to_do(name: str) -> None:
    pass


@dataclass(slots=True)
class Session:
    """Runs are numbered; equal numbers give equal prompts, so that targets that are compared see the same ones."""

    settings: SessionSettings
    progress: Progress = lambda label, answers: None
    on_turn: OnTurn = _nothing_to_do
    num_runs: int = field(default=0, init=False)

    async def warm_up(self, target: Target, *, equal: bool = False) -> None:
        """A few requests, one at a time and not counted. Raises TargetError if none of them gets an answer, and with
        `equal` if one has another length than asked for."""
        await self.on_turn(target.name)
        plan = self.settings.workload.plan(self.settings.num_warm_up, math.inf)
        runs = [await self._drive(target, [_alone(request)], f"{target.name}: warm-up") for request in plan]
        errors = [answer.error for run in runs for answer in run.answers if answer.error is not None]
        if errors and len(errors) == len(plan):
            raise TargetError(f"{target.name}: {errors[-1]}", target.name)
        if equal:
            for run in runs:
                check_lengths(summarize(run, self.settings.slo))

    async def solo_gap_s(self, target: Target) -> float:
        """The inter-token time of a request that is alone: the median over a few. Raises TargetError."""
        gaps_s: list[float] = []
        for number in range(SOLO_REPEATS):
            request = PlannedRequest(number, 0.0, SOLO_INPUT_TOKENS, SOLO_OUTPUT_TOKENS)
            answer = (await self._drive(target, [request], f"{target.name}: alone")).answers[0]
            if answer.error is not None:
                raise TargetError(f"{target.name}: {answer.error}")
            gaps_s += answer.gaps_s
        if not gaps_s:
            raise TargetError(f"{target.name}: a lone answer came in one piece, so it has no inter-token time")
        return statistics.median(gaps_s)

    async def sweep(self, target: Target, rates: Sequence[float | None]) -> list[Measured]:
        """One run for each rate; None: the workload's own."""
        return [await self._measure(target, rate) for rate in rates]

    async def compare(self, targets: Sequence[Target], rate: float | None, num_rounds: int) -> list[list[Measured]]:
        """Drives the targets in turn with the same arrivals and prompts; for each target, its rounds.

        Every other round goes backwards, so that a machine that slows down favours nobody. Raises
        UnequalAnswersError for a target whose answers have another length than asked for.
        """
        rounds: list[list[Measured]] = [[] for _ in targets]
        for number in range(num_rounds):
            order = list(range(len(targets)))
            run_number = self.num_runs
            for place in reversed(order) if number % 2 else order:
                self.num_runs = run_number
                await self.on_turn(targets[place].name)
                measured = await self._measure(targets[place], rate)
                check_lengths(measured.summary)
                rounds[place].append(measured)
                if any(answer.cut_s is not None for answer in measured.run.answers):
                    await self._settle(targets[place])
        return rounds

    async def capacity(self, target: Target, start_rate: float) -> tuple[Capacity, list[Measured]]:
        """The highest rate that keeps the service level, and the runs that led there."""
        settings = self.settings
        measured: list[Measured] = []
        loop = asyncio.get_running_loop()

        async def measure(rate: float) -> str | None:
            if measured:
                await asyncio.sleep(PAUSE_S)
            measured.append(await self._measure(target, rate, stop_when_lost=True))
            return measured[-1].run.abandoned or settings.slo.miss(measured[-1].run.answers)

        found = await search_capacity(
            measure,
            start_rate=start_rate,
            precision=settings.precision,
            max_search_s=settings.max_search_s,
            clock=loop.time,
        )
        return found, measured

    async def _settle(self, target: Target) -> None:
        """What a run cut may still be at work in a server, and the next one has its turn only after that."""
        num_runs = self.num_runs
        answer = (await self._drive(target, [SETTLED], f"{target.name}: settling")).answers[0]
        self.num_runs = num_runs
        if answer.error is not None:
            raise TargetError(f"{target.name}: after its run: {answer.error}", target.name)

    async def _measure(self, target: Target, rate: float | None, *, stop_when_lost: bool = False) -> Measured:
        settings = self.settings
        if isinstance(settings.workload, ChatsWorkload):
            run = await self._drive_chats(target, settings.workload)
            return Measured(run, summarize(run, settings.slo))
        count = settings.num_requests
        if stop_when_lost and rate is not None:
            count = max(count or 0, round(rate * settings.trial_s)) or None
        plan = settings.workload.plan(count, rate)
        label = target.name if rate is None else f"{target.name} at {rate:.3g}/s"
        run = await self._drive(target, plan, label, settings.slo if stop_when_lost else None)
        return Measured(run, summarize(run, settings.slo))

    async def _drive_chats(self, target: Target, workload: ChatsWorkload) -> Run:
        def watch(answers: Sequence[Answer]) -> str | None:
            self.progress(f"{target.name}: chats", answers)
            return None

        number, self.num_runs = self.num_runs, self.num_runs + 1
        return await drive_chats(
            target, workload, run_number=number, timeout_s=self.settings.timeout_s, watch=watch
        )

    async def _drive(self, target: Target, plan: Sequence[PlannedRequest], label: str, slo: Slo | None = None) -> Run:
        loop = asyncio.get_running_loop()
        loss_watch = None if slo is None else LossWatch(slo)

        def watch(answers: Sequence[Answer]) -> str | None:
            self.progress(label, answers)
            return None if loss_watch is None else loss_watch.lost(answers, loop.time())

        number, self.num_runs = self.num_runs, self.num_runs + 1
        return await drive(target, plan, run_number=number, timeout_s=self.settings.timeout_s, watch=watch)


def _alone(request: PlannedRequest) -> PlannedRequest:
    return PlannedRequest(0, 0.0, request.num_input_tokens, request.num_output_tokens, request.kind)
