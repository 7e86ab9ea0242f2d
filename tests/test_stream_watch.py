"""How long a stream is waited for: stalls, and workers that were told to stop."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from deployments.stream_watch import DrainedError, StalledError, StreamWatch


async def numbers(*pauses_s: float) -> AsyncIterator[int]:
    for number, pause_s in enumerate(pauses_s):
        await asyncio.sleep(pause_s)
        yield number


def seen(watch: StreamWatch, stream: AsyncIterator[int]) -> tuple[list[int], type[BaseException]]:
    async def scenario() -> tuple[list[int], type[BaseException]]:
        items: list[int] = []
        while True:
            try:
                items.append(await watch.next(stream))
            except (StalledError, DrainedError, StopAsyncIteration) as error:
                return items, type(error)

    return asyncio.run(scenario())


def test_a_stream_that_goes_on_is_not_stalled_however_long_it_takes():
    watch = StreamWatch(0.5, 10.0, has_successor=lambda: True)
    assert seen(watch, numbers(*[0.1] * 6)) == ([0, 1, 2, 3, 4, 5], StopAsyncIteration)


def test_silence_is_a_stall():
    watch = StreamWatch(0.05, 10.0, has_successor=lambda: True)
    assert seen(watch, numbers(0.0, 5.0)) == ([0], StalledError)


@pytest.mark.parametrize("has_successor", [True, False])
def test_a_stopping_worker_keeps_its_stream_for_the_grace_and_longer_where_nobody_can_take_over(has_successor: bool):
    now_s = 0.0

    def clock() -> float:
        nonlocal now_s
        now_s += 1.0
        return now_s

    watch = StreamWatch(5.0, 3.0, lambda: has_successor, clock)
    watch.drain()
    watch.drain()
    assert seen(watch, numbers(*[0.0] * 5)) == (
        ([0, 1], DrainedError) if has_successor else ([0, 1, 2, 3, 4], StopAsyncIteration)
    )


def test_no_grace_hands_over_at_once():
    watch = StreamWatch(5.0, 0.0, has_successor=lambda: True)
    watch.drain()
    assert seen(watch, numbers(0.0)) == ([], DrainedError)
