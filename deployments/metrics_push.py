"""`MetricsPusher`: sends one process's cumulative totals, and a worker's steps, to the metrics actor.

Owns the source's name and epoch, what the actor wants to be reminded of, and the rule that metrics never disturb
serving. Does not know what is counted, nor when to push.
"""

import asyncio
import logging
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from monitoring.accumulator import Snapshot
from monitoring.metrics_store import Inheritance
from monitoring.step_feed import Row

logger = logging.getLogger(__name__)

PUSH_PERIOD_S = 1.0
#: a push that takes longer is given up; the next one carries everything, as totals are cumulative
_PUSH_TIMEOUT_S = 5.0


class MetricsPusher:
    """`actor` is the metrics actor's handle, `source` a name that no other living process uses (a worker's rank,
    an ingress's replica id). The epoch is this object: one for each process."""

    def __init__(self, actor: Any, source: str) -> None:
        self._actor = actor
        self._source = source
        self._epoch = uuid.uuid4().hex
        self._inheritance: Inheritance | None = None
        self._failing: set[str] = set()

    async def push(self, snapshot: Snapshot) -> None:
        """A failure is logged when it begins, never raised."""
        async with self._delivery("metrics"):
            self._inheritance = await self._actor.push.remote(self._source, self._epoch, snapshot, self._inheritance)

    async def push_steps(self, worker: str, rows: list[Row]) -> None:
        """As `push`. Rows that are not delivered are lost: the page has a gap."""
        async with self._delivery("steps"):
            await self._actor.push_steps.remote(worker, rows)

    @asynccontextmanager
    async def _delivery(self, what: str) -> AsyncIterator[None]:
        try:
            async with asyncio.timeout(_PUSH_TIMEOUT_S):
                yield
        except Exception as error:
            if what not in self._failing:
                logger.warning("%s of %s are not delivered: %r", what, self._source, error)
            self._failing.add(what)
        else:
            self._failing.discard(what)

    def say_goodbye(self) -> None:
        """This process ends on purpose: its gauges go. Does not wait, as the process is ending."""
        self._actor.drop.remote(self._source, self._epoch)


def log_failure(task: asyncio.Task[None]) -> None:
    """A done callback for reporting tasks: metrics that stop must be seen, though serving goes on."""
    if not task.cancelled() and (error := task.exception()) is not None:
        logger.error("metrics are no longer reported", exc_info=error)
