"""Targets for the benchmark that answer on the event loop's own clock, so that a virtual one makes them exact."""

import asyncio
from dataclasses import dataclass, field

from deployments.bench.requests import Answer
from deployments.bench.target import TargetError


@dataclass
class PacedTarget:
    """The first token after `ttft_s`, then one every `gap_s`, however many are asked for."""

    ttft_s: float = 0.1
    gap_s: float = 0.02
    name: str = "paced"
    failing: frozenset[int] = frozenset()
    calls: list[tuple[int, int]] = field(default_factory=list)
    cancelled: list[int] = field(default_factory=list)

    async def open(self) -> None:
        pass

    async def close(self) -> None:
        pass

    async def ask(self, answer: Answer, run: int) -> None:
        number = answer.request.number
        self.calls.append((run, number))
        if number in self.failing:
            raise TargetError("refused")
        answer.num_input_tokens = answer.request.num_input_tokens
        try:
            for place in range(answer.request.num_output_tokens):
                await asyncio.sleep(self.gap_s if place else self.ttft_s)
                answer.delivery_times_s.append(asyncio.get_running_loop().time())
                answer.num_output_tokens += 1
        except asyncio.CancelledError:
            self.cancelled.append(number)
            raise


@dataclass
class OneAtATime(PacedTarget):
    """Serves in order of arrival, each `service_s` long: its capacity is 1 / service_s requests a second."""

    service_s: float = 0.5
    _turn: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def ask(self, answer: Answer, run: int) -> None:
        async with self._turn:
            self.ttft_s = self.service_s - (answer.request.num_output_tokens - 1) * self.gap_s
            await PacedTarget.ask(self, answer, run)
