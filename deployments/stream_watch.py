"""`StreamWatch`: how long one stream may be waited for.

Owns the two ends of patience with a stream: the stall, from each item anew, and the end of its worker's drain, once
that has begun. Knows nothing of what the stream carries, except that a living worker says something often.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from typing import TypeVar

T = TypeVar("T")


class StalledError(Exception):
    """Nothing came for the time of a stall."""


class DrainedError(Exception):
    """The worker was told to stop, the time for its streams is over, and another one can take over."""


class StreamWatch:
    """`has_successor` says whether a worker is there that could go on. Without one a stream is best left where it is:
    its worker stops when it stops."""

    def __init__(
        self,
        stall_s: float,
        drain_grace_s: float,
        has_successor: Callable[[], bool],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._stall_s = stall_s
        self._drain_grace_s = drain_grace_s
        self._has_successor = has_successor
        self._clock = clock
        self._drain_end_s: float | None = None

    def drain(self) -> None:
        """The worker was told to stop. May be called from any thread, and again."""
        if self._drain_end_s is None:
            self._drain_end_s = self._clock() + self._drain_grace_s

    async def next(self, stream: AsyncIterator[T]) -> T:
        """The stream's next item. Raises StalledError, DrainedError, or what the stream raises, its end included."""
        if self._drain_end_s is not None and self._clock() >= self._drain_end_s and self._has_successor():
            raise DrainedError
        try:
            # Not `wait_for`, which makes a task for each item.
            async with asyncio.timeout(self._stall_s):
                return await anext(stream)
        except TimeoutError:
            raise StalledError from None
