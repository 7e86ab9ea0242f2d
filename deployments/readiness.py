"""`ReadyProbe`: whether any worker would serve a request now. Asks all of them at once; the first that says so decides.

Knows a call to one replica by its id, and that a worker which hangs does not answer.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable

logger = logging.getLogger(__name__)

#: a worker whose event loop runs answers in milliseconds, however busy its engine is
ANSWER_TIMEOUT_S = 2.0
#: everybody who asks within this time gets the same answer
KEEP_S = 0.5


class ReadyProbe:
    """`worker_ids`: the replicas there are; `ask`: returns if that one is well, raises if it is not."""

    def __init__(
        self, worker_ids: Callable[[], list[str]], ask: Callable[[str], Awaitable[object]], keep_s: float = KEEP_S
    ) -> None:
        self._worker_ids = worker_ids
        self._ask = ask
        self._keep_s = keep_s
        self._asking: asyncio.Task[bool] | None = None
        self._answered_s = float("-inf")

    async def is_ready(self) -> bool:
        asking = self._asking
        if asking is None or (asking.done() and time.monotonic() - self._answered_s > self._keep_s):
            asking = self._asking = asyncio.create_task(self._is_any_well())
        return await asyncio.shield(asking)

    async def _is_any_well(self) -> bool:
        asked = [asyncio.create_task(self._is_well(worker_id)) for worker_id in self._worker_ids()]
        try:
            for answer in asyncio.as_completed(asked):
                if await answer:
                    return True
            return False
        finally:
            self._answered_s = time.monotonic()
            for task in asked:
                task.cancel()
            await asyncio.gather(*asked, return_exceptions=True)

    async def _is_well(self, worker_id: str) -> bool:
        try:
            async with asyncio.timeout(ANSWER_TIMEOUT_S):
                await self._ask(worker_id)
        except Exception as error:
            logger.warning("worker %s is not ready: %r", worker_id, error)
            return False
        return True
