"""Chats that stream all the time while a long prompt comes in every few seconds: what is asked, and how it is driven.

The long prompts leave at their moments, whatever becomes of anything else. Each chat asks again as soon as its answer
has ended, as people do. So a run has a set length, at which what is under way is cut; all of it but the cut is known
before: the n-th request of a chat is the same for every target. Knows nothing of what a target is.
"""

import asyncio
import contextlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

from deployments.bench.chats_summary import CHAT, LONG
from deployments.bench.driver import LEAD_S, WATCH_PERIOD_S, Run, Watch, ask
from deployments.bench.loop_lag import LoopLag
from deployments.bench.mixes import LengthRange
from deployments.bench.requests import Answer, PlannedRequest
from deployments.bench.target import Target

#: a run has room for six long prompts, the first after one interval
DEFAULT_DURATION_S = 35.0
LONG_EVERY_S = 5.0
#: a chat brings its history
DEFAULT_INPUT_LEN = LengthRange(128, 1024)
DEFAULT_OUTPUT_LEN = LengthRange(256, 256)


@dataclass(frozen=True, slots=True)
class ChatsWorkload:
    """Lengths in tokens. The chats begin one after the other, as people do, and so they also go on. The last long
    prompt leaves one interval before the end, so that its answer can come."""

    duration_s: float = DEFAULT_DURATION_S
    num_chats: int = 8
    chat_input_tokens: LengthRange = DEFAULT_INPUT_LEN
    chat_output_tokens: LengthRange = DEFAULT_OUTPUT_LEN
    seed: int = 0
    chats_begin_within_s: float = 2.0
    long_input_tokens: int = 1900
    long_output_tokens: int = 16
    long_every_s: float = LONG_EVERY_S

    @property
    def own_rate(self) -> float | None:
        return None

    def describe(self) -> str:
        return (
            f"{self.num_chats} chats of {self.chat_input_tokens} in / {self.chat_output_tokens} out all the time, for "
            f"{self.duration_s:g} s, every {self.long_every_s:g} s a prompt of {self.long_input_tokens}"
        )

    def plan(self, num_requests: int | None, rate: float | None) -> list[PlannedRequest]:
        """A first request of either kind, at once: what a target can warm up with."""
        both = [self.chat_request(0, 0, 0.0), PlannedRequest(1, 0.0, self.long_input_tokens, 1, LONG)]
        return both[:num_requests]

    def chat_request(self, chat: int, turn: int, arrival_s: float) -> PlannedRequest:
        """Numbers of chats are even, those of long prompts odd: no two requests of a run share theirs."""
        number = 2 * (turn * self.num_chats + chat)
        draw = Random(f"chat {self.seed} {number}")
        num_input_tokens, num_output_tokens = self.chat_input_tokens.draw(draw), self.chat_output_tokens.draw(draw)
        return PlannedRequest(number, arrival_s, num_input_tokens, num_output_tokens, CHAT)

    def first_arrival_s(self, chat: int) -> float:
        return chat * self.chats_begin_within_s / self.num_chats

    def long_requests(self) -> list[PlannedRequest]:
        count = max(math.floor(self.duration_s / self.long_every_s * (1 + 1e-9)) - 1, 0)
        return [
            PlannedRequest(
                2 * place + 1, (place + 1) * self.long_every_s, self.long_input_tokens, self.long_output_tokens, LONG
            )
            for place in range(count)
        ]


async def drive_chats(
    target: Target,
    workload: ChatsWorkload,
    *,
    run_number: int,
    timeout_s: float,
    watch: Watch = lambda answers: None,
) -> Run:
    """One run of `workload.duration_s`. A chat whose request fails asks no more."""
    loop = asyncio.get_running_loop()
    started_s = loop.time() + LEAD_S
    ends_s = started_s + workload.duration_s
    answers: list[Answer] = []
    abandoned: str | None = None
    async with LoopLag() as lag:
        asking = asyncio.create_task(_ask_all(target, workload, answers, started_s, run_number, timeout_s))
        try:
            while not asking.done() and abandoned is None and (left_s := ends_s - loop.time()) > 0:
                await asyncio.wait([asking], timeout=min(WATCH_PERIOD_S, left_s))
                abandoned = watch(answers)
        finally:
            ended_s = loop.time()
            _cut(answers, ended_s)
            if not asking.done():
                asking.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await asking
    return Run(target.name, answers, started_s, ended_s, lag.lags_s, abandoned, is_of_chats=True)


def _cut(answers: Sequence[Answer], now: float) -> None:
    for answer in answers:
        if answer.sent_s is not None and answer.ended_s is None:
            answer.cut_s = now
            answer.num_output_tokens = len(answer.delivery_times_s)


async def _ask_all(
    target: Target, workload: ChatsWorkload, answers: list[Answer], started_s: float, run_number: int, timeout_s: float
) -> None:
    loop = asyncio.get_running_loop()

    async def ask_at(request: PlannedRequest) -> Answer:
        answer = Answer(request, started_s + request.arrival_s)
        answers.append(answer)
        if (delay_s := answer.intended_s - loop.time()) > 0:
            await asyncio.sleep(delay_s)
        await ask(target, answer, run_number, timeout_s)
        return answer

    async def chat(number: int) -> None:
        turn, arrival_s = 0, workload.first_arrival_s(number)
        while True:
            answer = await ask_at(workload.chat_request(number, turn, arrival_s))
            if answer.error is not None or answer.ended_s is None:
                return
            turn, arrival_s = turn + 1, answer.ended_s - started_s

    async with asyncio.TaskGroup() as group:
        for request in workload.long_requests():
            group.create_task(ask_at(request))
        for number in range(workload.num_chats):
            group.create_task(chat(number))
