"""Several asynchronous streams as one, in the order in which their items come."""

import asyncio
from collections.abc import AsyncGenerator
from typing import TypeVar

T = TypeVar("T")


async def merged(streams: list[AsyncGenerator[T, None]]) -> AsyncGenerator[T, None]:
    """All items of all streams. The first exception of any ends all; closing this closes them all."""
    if len(streams) == 1:
        try:
            async for only in streams[0]:
                yield only
        finally:
            await streams[0].aclose()
        return
    queue: asyncio.Queue[T | _Ended] = asyncio.Queue()
    pumps = [asyncio.create_task(_pump(stream, queue)) for stream in streams]
    try:
        num_open = len(pumps)
        while num_open:
            item = await queue.get()
            if not isinstance(item, _Ended):
                yield item
                continue
            num_open -= 1
            if item.error is not None:
                raise item.error
    finally:
        # Serve does not cancel what runs in tasks of its own.
        for pump in pumps:
            pump.cancel()
        await asyncio.gather(*pumps, return_exceptions=True)


class _Ended:
    def __init__(self, error: Exception | None) -> None:
        self.error = error


async def _pump(stream: AsyncGenerator[T, None], queue: "asyncio.Queue[T | _Ended]") -> None:
    error: Exception | None = None
    try:
        async for item in stream:
            queue.put_nowait(item)
    except Exception as caught:
        error = caught
    finally:
        await stream.aclose()
        queue.put_nowait(_Ended(error))
