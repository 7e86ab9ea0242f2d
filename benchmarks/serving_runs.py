"""The same requests through the engine's loop in this process and through Serve: when each token came.

Owns how requests are kept in flight and what is written down of them. Knows neither statistics nor how a server is
started.
"""

import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field

from deployments.engine_seam import EngineBuilder
from tests.chaos.client import ask, session
from worker.config import EngineConfig
from worker.types import EngineRequest, SamplingParams, TokenEvent

MODEL_NAME = "bench"
FIRST_TOKEN_ID = 5
NUM_PROMPT_VALUES = 200


@dataclass(frozen=True, slots=True)
class Workload:
    """`num_streams` are in flight until `num_requests` have been asked. No two prompts have a beginning in common."""

    num_streams: int
    num_requests: int
    num_prompt_tokens: int
    num_output_tokens: int

    def prompts(self, round_: int) -> list[list[int]]:
        values = range(FIRST_TOKEN_ID, FIRST_TOKEN_ID + NUM_PROMPT_VALUES)
        first = round_ * self.num_requests
        pairs = itertools.islice(itertools.product(values, values), first, first + self.num_requests)
        return [[one, two, *([one] * (self.num_prompt_tokens - 2))] for one, two in pairs]


@dataclass(slots=True)
class Answer:
    """`times_s` holds when each letter came (of the paced engine a letter is a token); monotonic seconds, as all times
    here."""

    request_id: str
    sent_s: float
    times_s: list[float] = field(default_factory=list)
    num_tokens: int = 0

    @property
    def ttft_s(self) -> float:
        return self.times_s[0] - self.sent_s


async def _kept_in_flight(
    workload: Workload, prompts: list[list[int]], ask_one: Callable[[list[int]], Awaitable[Answer]]
) -> list[Answer]:
    waiting = iter(prompts)
    answers: list[Answer] = []

    async def client() -> None:
        for prompt in waiting:
            answers.append(await ask_one(prompt))

    await asyncio.gather(*(client() for _ in range(workload.num_streams)))
    return answers


class LoopSide:
    """The engine's loop in a thread of this process; tokens cross to the event loop as a worker's do."""

    def __init__(self, build: EngineBuilder, config: EngineConfig) -> None:
        self._queues: dict[str, asyncio.Queue[TokenEvent]] = {}
        self._event_loop: asyncio.AbstractEventLoop | None = None
        self._number = itertools.count()
        _, self._loop = build(config, self._deliver, lambda error: None)
        self._loop.start()

    def close(self) -> None:
        self._loop.stop(10.0)

    def run(self, workload: Workload, round_: int) -> list[Answer]:
        return asyncio.run(self._run(workload, round_))

    async def _run(self, workload: Workload, round_: int) -> list[Answer]:
        self._event_loop = asyncio.get_running_loop()
        params = SamplingParams(workload.num_output_tokens, temperature=0.0, ignore_eos=True)

        async def ask_one(prompt: list[int]) -> Answer:
            answer = Answer(f"loop-{next(self._number)}", time.monotonic())
            async for event in self._events(EngineRequest(answer.request_id, prompt, params)):
                answer.times_s += [time.monotonic()] * len(event.token_ids)
            answer.num_tokens = len(answer.times_s)
            return answer

        return await _kept_in_flight(workload, workload.prompts(round_), ask_one)

    async def _events(self, request: EngineRequest) -> AsyncIterator[TokenEvent]:
        queue = self._queues[request.request_id] = asyncio.Queue()
        self._loop.submit(request)
        while True:
            event = await queue.get()
            yield event
            if event.finish_reason is not None:
                assert event.finish_reason == "length", event
                del self._queues[request.request_id]
                return

    def _deliver(self, events: list[TokenEvent]) -> None:
        assert self._event_loop is not None
        self._event_loop.call_soon_threadsafe(self._hand_on, events)

    def _hand_on(self, events: list[TokenEvent]) -> None:
        for event in events:
            self._queues[event.request_id].put_nowait(event)


class ServedSide:
    """Over HTTP. A chunk that brings several tokens brings all of them when it comes."""

    def __init__(self, url: str) -> None:
        self._url = url

    def run(self, workload: Workload, round_: int) -> list[Answer]:
        return asyncio.run(self._run(workload, round_))

    async def _run(self, workload: Workload, round_: int) -> list[Answer]:
        async with session(self._url) as http:

            async def ask_one(prompt: list[int]) -> Answer:
                body = {
                    "model": MODEL_NAME,
                    "prompt": prompt,
                    "max_tokens": workload.num_output_tokens,
                    "temperature": 0.0,
                    "ignore_eos": True,
                }
                stream = await ask(http, body)
                assert stream.is_done, stream.end
                assert stream.usage is not None
                answer = Answer(stream.response_id, stream.sent_s, num_tokens=stream.usage["completion_tokens"])
                for time_s, num_chars in zip(stream.times_s, stream.chunk_chars, strict=True):
                    answer.times_s += [time_s] * num_chars
                return answer

            return await _kept_in_flight(workload, workload.prompts(round_), ask_one)
