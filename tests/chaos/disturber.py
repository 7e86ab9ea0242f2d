"""What happens to the workers during a chaos run: some are killed, one is stopped, all are redeployed.

Owns the order, and when and to which process it happened. Knows nothing of what the answers should be.
"""

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from tests.chaos.server import ChaosServer

STOP_S = 30.0
_LOOK_PERIOD_S = 0.1
_ALL_UP_TIMEOUT_S = 90.0


@dataclass(frozen=True)
class Disturbances:
    """`redeploy`: arguments that change, or None. `num_kills` are spread around the others."""

    num_kills: int = 5
    stop_s: float = STOP_S
    redeploy: dict[str, Any] | None = None


@dataclass
class Event:
    """Something was done to process `pid` (0: to all) at `time_s`, on the monotonic clock."""

    kind: str
    pid: int
    time_s: float


@dataclass
class Disturber:
    server: ChaosServer
    num_workers: int
    events: list[Event] = field(default_factory=list)
    say: Callable[[str], None] = lambda text: None

    async def disturb(self, wanted: Disturbances) -> None:
        """One thing at a time, each when all workers are up. Only the stopped one stays stopped meanwhile."""
        kills_before = wanted.num_kills // 2
        for _ in range(kills_before):
            await self._kill_one()
        stopping = await self._stop_one(wanted.stop_s) if wanted.stop_s else None
        for _ in range(wanted.num_kills - kills_before):
            await self._kill_one()
        if wanted.redeploy is not None:
            await self._redeploy(wanted.redeploy)
        if stopping is not None:
            await stopping

    def pids(self, kind: str) -> list[int]:
        return [event.pid for event in self.events if event.kind == kind]

    async def _kill_one(self) -> None:
        pid = await self._busiest()
        self._note("kill", pid)
        os.kill(pid, signal.SIGKILL)

    async def _stop_one(self, stop_s: float) -> asyncio.Task[None]:
        pid = await self._busiest()
        self._note("stop", pid)
        os.kill(pid, signal.SIGSTOP)
        return asyncio.create_task(self._continue(pid, stop_s))

    async def _continue(self, pid: int, after_s: float) -> None:
        await asyncio.sleep(after_s)
        # Serve may have replaced it meanwhile.
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)

    async def _redeploy(self, changed: dict[str, Any]) -> None:
        before = await self._all_up()
        self._note("redeploy", 0)
        await asyncio.to_thread(self.server.deploy, None, **changed)
        async with asyncio.timeout(_ALL_UP_TIMEOUT_S):
            while set(await self._all_up()) & set(before):
                await asyncio.sleep(_LOOK_PERIOD_S)

    def _note(self, kind: str, pid: int) -> None:
        self.events.append(Event(kind, pid, time.monotonic()))
        self.say(f"{kind} {pid or ''}")

    async def _busiest(self) -> int:
        """When all are up and one of them holds an answer: the one that was given most."""
        while True:
            pids = await self._all_up()
            by_work = {pid: len(self.server.request_ids(pid)) for pid in pids}
            if max(by_work.values()) > 0:
                return max(by_work, key=by_work.__getitem__)
            await asyncio.sleep(_LOOK_PERIOD_S)

    async def _all_up(self) -> list[int]:
        """Process ids, as soon as Serve has all workers up and they live."""
        async with asyncio.timeout(_ALL_UP_TIMEOUT_S):
            while True:
                pids = await asyncio.to_thread(self.server.worker_pids)
                gone = {event.pid for event in self.events}
                if len(pids) == self.num_workers and not gone & set(pids):
                    return pids
                await asyncio.sleep(_LOOK_PERIOD_S)
