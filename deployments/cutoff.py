"""`Cutoff`: the moment at which an answer ends, whatever it waits for: its deadline, or the server's own end.

Knows tasks and time, nothing of requests.
"""

import asyncio
import time
from collections.abc import Awaitable
from typing import TypeVar

from deployments.protocol.errors import ApiError

T = TypeVar("T")


class Cutoff:
    """Of one answer, whose awaits go through `guard` one at a time. The error that ends it is an `ApiError`."""

    def __init__(self, deadline_s: float | None, error: ApiError) -> None:
        """`deadline_s`: in `time.monotonic()`; None: only `end` ends it. `error`: what a passed deadline raises."""
        loop = asyncio.get_running_loop()
        self._when_s = None if deadline_s is None else loop.time() + deadline_s - time.monotonic()
        self._error = error
        self._is_over = False
        self._timeout: asyncio.Timeout | None = None

    async def guard(self, awaitable: Awaitable[T]) -> T:
        """What `awaitable` returns, unless the moment comes first: then it is cancelled."""
        timeout = asyncio.timeout_at(asyncio.get_running_loop().time() if self._is_over else self._when_s)
        try:
            async with timeout:
                self._timeout = timeout
                return await awaitable
        except TimeoutError as error:
            if timeout.expired():
                raise self._error from error
            raise
        finally:
            self._timeout = None

    def end(self, error: ApiError) -> None:
        """The moment is now."""
        self._error = error
        self._is_over = True
        if self._timeout is not None and not self._timeout.expired():
            self._timeout.reschedule(asyncio.get_running_loop().time())
