"""`WorkerService`: the passage between the engine's thread and the event loop that serves its streams.

Owns the open streams, their heartbeats, health, and the order in which a dead engine ends everything. It knows
neither Ray nor metrics nor text.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import replace

from deployments.engine_seam import Loop
from deployments.frames import Accepted, Frame, Heartbeat, Overloaded
from deployments.live_options import LiveOptions
from deployments.worker_queue import QueueLimits, WorkerQueue
from deployments.worker_streams import HEARTBEAT_CHECK_S, WorkerStreams
from scheduler.life_report import LifeReport
from worker.types import EngineLoad, EngineRequest, TokenEvent

logger = logging.getLogger(__name__)

#: how long the streams of a dead engine may take to hand on their error events before the process ends
EXIT_DELAY_S = 1.0
#: the engine answers between two steps
LIFE_TIMEOUT_S = 2.0
#: for bytes that were written to leave the process
_FLUSH_S = 0.1


class WorkerDeadError(RuntimeError):
    """The engine's loop is dead or stuck."""


class WorkerService:
    """Made on the event loop that serves. `deliver` and `on_death` are for the engine's thread, all else for the
    event loop's. `end_process` is called once, soon after the engine died."""

    def __init__(
        self, worker: int, replica_id: str, step_timeout_s: float, end_process: Callable[[], object]
    ) -> None:
        self._replica_id = replica_id
        self.set_worker(worker)
        self._step_timeout_s = step_timeout_s
        self._end_process = end_process
        self._event_loop = asyncio.get_running_loop()
        self._streams = WorkerStreams()
        #: without limits until `apply` sets some
        self.queue = WorkerQueue(QueueLimits(0, 0))
        self._engine_loop: Loop
        self._block_size: int
        self._heart: asyncio.Task[None]
        self._farewell: asyncio.Task[None]
        #: set whenever the last open stream has ended
        self.streams_ended = asyncio.Event()

    def start(self, engine_loop: Loop, block_size: int) -> None:
        """`block_size`: tokens in a block of the engine's cache."""
        self._engine_loop, self._block_size = engine_loop, block_size
        engine_loop.start()
        self._heart = asyncio.create_task(self._beat())

    def set_worker(self, worker: int) -> None:
        """The rank from now on: Serve may change it when other replicas go."""
        self._accepted = Accepted(worker, self._replica_id)

    def apply(self, options: LiveOptions) -> None:
        """All of them or, with `LimitError`, none: the queue's at once, a step's from the next step on."""
        self._engine_loop.set_limits(options.steps)
        self.queue.limits = options.queue

    async def stop(self, timeout_s: float) -> None:
        """The engine's loop first: it would deliver to an event loop that is gone."""
        await asyncio.to_thread(self._engine_loop.stop, timeout_s)
        self._heart.cancel()

    async def generate(self, request: EngineRequest) -> AsyncIterator[list[Frame]]:
        """`Accepted` at once, then what there is as it comes, until the last sample has ended; or `Overloaded` alone.

        A generator that is closed or cancelled before aborts the request in the engine.
        """
        self.check_health()
        load = self._engine_loop.status().load
        num_tokens = request.num_known_tokens
        retry_after_s = self.queue.retry_after_s(num_tokens, self._without_who_finds_room(load, num_tokens))
        # An answer that was begun elsewhere was let in there: its client reads already.
        if retry_after_s is not None and not any(request.output_token_ids):
            yield [Overloaded(retry_after_s, load)]
            return
        self.queue.took(num_tokens)
        self._streams.open(request)
        try:
            self._engine_loop.submit(request)
            yield [self._accepted]
            async for frames in self._streams.frames(request.request_id):
                yield frames
        finally:
            if self._streams.close(request.request_id):
                self._engine_loop.abort(request.request_id)
            if not self._streams:
                self.streams_ended.set()

    def _without_who_finds_room(self, load: EngineLoad, num_tokens: int) -> EngineLoad:
        """The load as if those were admitted that wait for nobody to end, as all of a burst do at an idle engine: there
        are sequence slots for them, and blocks for all that is to be computed, a newcomer's `num_tokens` included."""
        if load.num_waiting == 0 or load.num_free_blocks * self._block_size < load.num_queued_tokens + num_tokens:
            return load
        num_beyond_slots = max(self._streams.num_open_samples - self._engine_loop.limits.max_num_seqs, 0)
        return replace(load, num_waiting=min(load.num_waiting, num_beyond_slots))

    def finish(self, request_id: str, index: int, num_tokens: int) -> None:
        """The ingress ended this choice after `num_tokens` tokens (a stop string)."""
        self._engine_loop.finish(request_id, index, num_tokens)

    def abort(self, request_id: str) -> None:
        self._engine_loop.abort(request_id)

    async def life(self, request_id: str) -> LifeReport | None:
        """What the request's time was spent on; None where the engine does not know it, or does not answer."""
        try:
            async with asyncio.timeout(LIFE_TIMEOUT_S):
                return await asyncio.wrap_future(self._engine_loop.life(request_id))
        except TimeoutError:
            return None

    def check_health(self) -> None:
        """Reads the loop's status and no more, so that a long step cannot make it late."""
        status = self._engine_loop.status()
        if not status.alive:
            raise WorkerDeadError(f"the engine loop is dead: {status.error}")
        if status.step_age_s > self._step_timeout_s:
            raise WorkerDeadError(
                f"the engine is stuck in step {status.step_id} for {status.step_age_s:.0f} s"
            )
        if self._heart.done():
            raise WorkerDeadError("the heartbeats have stopped")

    def is_idle(self) -> bool:
        load = self._engine_loop.status().load
        return load.num_waiting + load.num_running + load.num_swapped == 0

    def deliver(self, events: list[TokenEvent]) -> None:
        """Once a step: one crossing for all streams."""
        load = self._engine_loop.status().load
        self._event_loop.call_soon_threadsafe(self._streams.deliver, events, load)

    def on_death(self, error: BaseException) -> None:
        self._event_loop.call_soon_threadsafe(self._die, error)

    def _die(self, error: BaseException) -> None:
        logger.error("the engine died and this worker with it", exc_info=error)
        self._streams.fail_all(f"the engine died: {error}", self._engine_loop.status().load)
        self._farewell = asyncio.create_task(self._end())

    async def _end(self) -> None:
        """Ends the process when the streams have ended, or without waiting any longer."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(EXIT_DELAY_S):
                while self._streams:
                    await asyncio.sleep(_FLUSH_S)
        await asyncio.sleep(_FLUSH_S)
        self._end_process()

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(HEARTBEAT_CHECK_S)
            status = self._engine_loop.status()
            self.queue.observe(time.monotonic(), status.load)
            self._streams.beat(Heartbeat(status.step_id, status.step_age_s, status.load))
