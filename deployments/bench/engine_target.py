"""The engine of this process as a target: token ids straight to the engine's loop, no HTTP and no text.

Deliveries are timed in the engine's thread, the moment a step has ended: the client adds nothing to them.
"""

import asyncio
import time
from typing import Protocol

from deployments.bench.prompts import PromptMaker
from deployments.bench.requests import Answer
from deployments.bench.target import TargetError
from worker.types import EngineRequest, SamplingParams, TokenEvent

_STOP_TIMEOUT_S = 60.0


class LoopLike(Protocol):
    """What the target needs of an engine loop."""

    def start(self) -> None: ...
    def stop(self, timeout_s: float) -> None: ...
    def submit(self, request: EngineRequest) -> None: ...
    def abort(self, request_id: str) -> None: ...


class EngineTarget:
    """`deliver` is what the loop must call with each step's events; it may be called from any thread."""

    def __init__(self, name: str, prompts: PromptMaker) -> None:
        self.name = name
        self._prompts = prompts
        self._loop: LoopLike | None = None
        self._event_loop: asyncio.AbstractEventLoop | None = None
        self._open: dict[str, tuple[Answer, asyncio.Future[None]]] = {}

    def attach(self, loop: LoopLike) -> None:
        self._loop = loop

    async def open(self) -> None:
        assert self._loop is not None
        self._event_loop = asyncio.get_running_loop()
        self._loop.start()

    async def close(self) -> None:
        if self._loop is not None and self._event_loop is not None:
            await self._event_loop.run_in_executor(None, self._loop.stop, _STOP_TIMEOUT_S)

    async def ask(self, answer: Answer, run: int) -> None:
        assert self._loop is not None
        assert self._event_loop is not None
        request = answer.request
        request_id = f"bench-{run}-{request.number}"
        params = SamplingParams(max_tokens=request.num_output_tokens, temperature=0.0, ignore_eos=True)
        ended = self._event_loop.create_future()
        self._open[request_id] = (answer, ended)
        answer.num_input_tokens = request.num_input_tokens
        try:
            self._loop.submit(EngineRequest(request_id, self._prompts.token_ids(request, run), params))
            await ended
        except asyncio.CancelledError:
            self._loop.abort(request_id)
            raise
        finally:
            self._open.pop(request_id, None)

    def deliver(self, events: list[TokenEvent]) -> None:
        now = time.monotonic()
        ended: list[tuple[asyncio.Future[None], str | None]] = []
        for event in events:
            entry = self._open.get(event.request_id)
            if entry is None:  # aborted, and this is its end
                continue
            answer, future = entry
            if event.token_ids:
                answer.delivery_times_s.append(now)
                answer.num_output_tokens += len(event.token_ids)
            if event.finish_reason is not None:
                is_failure = event.finish_reason in ("error", "abort")
                ended.append((future, (event.error or event.finish_reason) if is_failure else None))
        if ended and self._event_loop is not None:
            self._event_loop.call_soon_threadsafe(_settle, ended)


def _settle(ended: list[tuple[asyncio.Future[None], str | None]]) -> None:
    for future, error in ended:
        if future.done():
            continue
        if error is None:
            future.set_result(None)
        else:
            future.set_exception(TargetError(error))
