"""`FailoverClient`: a request goes on elsewhere when its worker dies, stalls or drains, and its caller sees a pause.

Owns when to try again, when to give up, and what is counted. What was delivered is `resumption.py`'s, how a worker is
reached the attempt client's. It knows neither Serve nor text.
"""

import asyncio
import logging
import random
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing

from deployments.explain.journey import Journey
from deployments.explain.journeys import Journeys
from deployments.frames import Frame
from deployments.resumption import Resumption
from deployments.worker_client import (
    AttemptClient,
    WorkerFailedError,
    WorkerLostError,
    WorkerOverloadedError,
    WorkerUnavailableError,
)
from worker.types import EngineRequest

logger = logging.getLogger(__name__)

#: workers that may be lost in a row without a token in between: each stall takes --stall-timeout-s to be seen
MAX_FRUITLESS_ATTEMPTS = 3
#: replicas that may die in a row on one request without a token in between. It is likely to be what kills them
MAX_DEATHS = 2
#: before an attempt that follows one without a token; doubled with each. Who had tokens goes on at once, so that
#: bystanders are ahead of a request that kills its worker
_FIRST_PAUSE_S = 0.25
_MAX_PAUSE_S = 2.0
#: between two looks for room at workers that are all full
_OVERLOAD_PAUSE_S = 0.25
_TELL_TIMEOUT_S = 1.0


class _Patience:
    """What has gone wrong since the last token. A drain is nobody's fault and is not counted."""

    def __init__(self) -> None:
        self._num_fruitless = 0
        self._dead: set[str] = set()

    def pause_s(self, error: WorkerLostError, *, has_progress: bool) -> float:
        """How long to wait before the next attempt. Raises `WorkerFailedError` where there is to be none."""
        if has_progress:
            self._num_fruitless = 0
            self._dead.clear()
        if error.reason == "drained":
            return 0.0
        self._num_fruitless += 1
        if error.reason == "died":
            self._dead.add(error.replica_id)
        if len(self._dead) >= MAX_DEATHS:
            raise WorkerFailedError(f"{len(self._dead)} workers died one after the other on this request") from error
        if self._num_fruitless > MAX_FRUITLESS_ATTEMPTS:
            raise WorkerFailedError(f"{self._num_fruitless} workers failed one after the other: {error}") from error
        if has_progress:
            return 0.0
        longest_s: float = min(_FIRST_PAUSE_S * 2 ** (self._num_fruitless - 1), _MAX_PAUSE_S)
        return longest_s * random.uniform(0.5, 1.0)


class FailoverClient:
    """Implements `WorkerClient`: one unbroken sequence of frames for each request, whatever becomes of its workers.

    What the engine refuses or fails by itself is handed on: another worker would say the same.
    """

    def __init__(
        self,
        client: AttemptClient,
        accept_s: float,
        on_failover: Callable[[str], None],
        journeys: Journeys | None = None,
    ) -> None:
        """`accept_s`: how long a request that was running may wait for another worker. `on_failover` is called with
        the reason for each worker that is lost to a request. `journeys` are told what happened when."""
        self._client = client
        self._accept_s = accept_s
        self._on_failover = on_failover
        self._journeys = journeys or Journeys()
        self._open: dict[str, Resumption] = {}

    async def generate(self, request: EngineRequest) -> AsyncGenerator[list[Frame], None]:
        resumption = self._open[request.request_id] = Resumption(request)
        journey = self._journeys.of(request.request_id)
        patience = _Patience()
        lost: set[str] = set()
        try:
            while not resumption.is_ended:
                try:
                    async with aclosing(self._attempt(resumption, journey, frozenset(lost))) as attempt:
                        async for frames in attempt:
                            yield frames
                except WorkerLostError as error:
                    self._on_failover(error.reason)
                    journey.lost(error.reason)
                    logger.warning("request %s: %s", request.request_id, error)
                    lost.add(error.replica_id)
                    await asyncio.sleep(patience.pause_s(error, has_progress=resumption.has_progress))
        finally:
            del self._open[request.request_id]

    async def finish(self, request_id: str, index: int, num_tokens: int) -> None:
        resumption = self._open.get(request_id)
        if resumption is not None:
            resumption.finish(index, num_tokens)
            await self._client.finish(resumption.attempt.request_id, index, num_tokens)

    async def abort(self, request_id: str) -> None:
        resumption = self._open.get(request_id)
        if resumption is not None:
            await self._client.abort(resumption.attempt.request_id)

    async def _attempt(
        self, resumption: Resumption, journey: Journey, lost: frozenset[str]
    ) -> AsyncGenerator[list[Frame], None]:
        """The frames of one attempt that are news to the caller, until it ends or its worker is lost."""
        attempt = resumption.next_attempt()
        journey.sent(attempt.request_id)
        was_accepted = resumption.is_accepted
        attempts = self._until_room(attempt, lost) if was_accepted else self._client.generate(attempt, lost)
        try:
            async with aclosing(attempts) as stream:
                journey.asked()
                async for frames in stream:
                    journey.received(frames)
                    is_first = not resumption.replica_id
                    fresh = resumption.take(frames)
                    if was_accepted and is_first:
                        await self._tell_of_ends(resumption)
                    if fresh:
                        yield fresh
                    journey.asked()
        except (WorkerUnavailableError, WorkerOverloadedError) as error:
            if not was_accepted:
                raise
            raise WorkerFailedError(f"the worker was lost, and no other one took the request: {error}") from error
        if not resumption.is_ended:
            raise WorkerLostError("the worker's stream ended before the answer did", "died", resumption.replica_id)

    async def _until_room(
        self, attempt: EngineRequest, lost: frozenset[str]
    ) -> AsyncGenerator[list[Frame], None]:
        """A request that was running has been let in: full queues make it wait."""
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + self._accept_s
        while True:
            try:
                async with aclosing(self._client.generate(attempt, lost)) as stream:
                    async for frames in stream:
                        yield frames
                return
            except WorkerOverloadedError:
                if loop.time() >= deadline_s:
                    raise
                await asyncio.sleep(_OVERLOAD_PAUSE_S)

    async def _tell_of_ends(self, resumption: Resumption) -> None:
        """Samples that ended at the caller while the attempt was on its way: only now can its worker be told."""
        for index, num_tokens in resumption.finished_meanwhile().items():
            try:
                async with asyncio.timeout(_TELL_TIMEOUT_S):
                    await self._client.finish(resumption.attempt.request_id, index, num_tokens)
            except TimeoutError:
                logger.warning("request %s: its worker could not be told of an end", resumption.attempt.request_id)
