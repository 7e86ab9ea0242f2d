"""How late the client's own event loop runs: what a client adds to the latencies it reports."""

import asyncio
from types import TracebackType

PERIOD_S = 0.01


class LoopLag:
    """Use as an async context; `lags_s` has one entry for each wake-up: how late it came."""

    def __init__(self) -> None:
        self.lags_s: list[float] = []
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> "LoopLag":
        self._task = asyncio.create_task(self._sample())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._task is not None
        self._task.cancel()
        await asyncio.wait([self._task])

    async def _sample(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            due_s = loop.time() + PERIOD_S
            await asyncio.sleep(PERIOD_S)
            self.lags_s.append(loop.time() - due_s)
