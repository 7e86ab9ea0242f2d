"""What a worker tells the metrics actor: under which rank, when, and when not."""

import asyncio
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from deployments import worker_reporter
from deployments.live_options import LiveOptions
from deployments.worker_queue import QueueLimits
from deployments.worker_reporter import WorkerReporter
from deployments.worker_service import WorkerService
from tests.fake_engine import FACTS, FakeLoop
from worker.types import EngineRequest, SamplingParams


class FakeActor:
    """Keeps what is pushed and dropped, in order."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, str]] = []
        self.snapshots: list[dict[str, Any]] = []
        self.push = SimpleNamespace(remote=self._push)
        self.drop = SimpleNamespace(remote=self._drop)

    async def _push(self, source: str, epoch: str, snapshot: dict[str, Any], inheritance: object) -> None:
        self.calls.append(("push", source))
        self.snapshots.append(snapshot)

    def _drop(self, source: str, epoch: str) -> None:
        self.calls.append(("drop", source))


async def eventually(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(5):
        while not condition():
            await asyncio.sleep(0.01)


def run(scenario: Callable[[WorkerReporter, FakeActor, WorkerService], Any]) -> FakeActor:
    async def main() -> FakeActor:
        actor = FakeActor()
        service = WorkerService(1, "replica", 60.0, lambda: None)
        loop = FakeLoop(service.deliver, service.on_death, 0.01)
        service.start(loop, 16)
        options = LiveOptions(loop.limits, QueueLimits(500, 7))
        reporter = WorkerReporter(service, loop, FACTS, lambda: actor, "m", 2.0, options, 1)
        reporting = asyncio.create_task(reporter.run())
        try:
            await scenario(reporter, actor, service)
        finally:
            reporting.cancel()
            await asyncio.gather(reporting, return_exceptions=True)
            await service.stop(5.0)
        return actor

    return asyncio.run(main())


def test_a_worker_that_ends_on_purpose_says_goodbye_last() -> None:
    async def scenario(reporter: WorkerReporter, actor: FakeActor, service: WorkerService) -> None:
        await eventually(lambda: len(actor.calls) >= 1)

    actor = run(scenario)
    assert actor.calls[0] == ("push", "worker-1")
    assert actor.calls[-1] == ("drop", "worker-1")


def test_under_another_rank_it_counts_anew_and_says_goodbye_to_the_old_one() -> None:
    async def scenario(reporter: WorkerReporter, actor: FakeActor, service: WorkerService) -> None:
        await eventually(lambda: len(actor.calls) >= 1)
        reporter.rank = 0
        service.streams_ended.set()
        await eventually(lambda: ("push", "worker-0") in actor.calls)

    actor = run(scenario)
    moved = actor.calls.index(("push", "worker-0"))
    assert actor.calls[moved - 1] == ("drop", "worker-1")
    assert actor.snapshots[-1]["labels"] == {"model": "m", "worker": "0"}
    assert actor.snapshots[-1]["gauges"]["stallfree_kv_blocks"]["device"] == FACTS.num_device_blocks


def test_live_options_and_a_refused_user_config_show() -> None:
    async def scenario(reporter: WorkerReporter, actor: FakeActor, service: WorkerService) -> None:
        await eventually(lambda: len(actor.calls) >= 1)
        reporter.is_user_config_refused = True
        service.streams_ended.set()
        await eventually(lambda: len(actor.snapshots) >= 2)

    gauges = run(scenario).snapshots[-1]["gauges"]
    assert gauges["stallfree_live_option"]["max_queued_tokens"] == 500
    assert gauges["stallfree_live_option"]["max_num_seqs"] == 64
    assert gauges["stallfree_user_config_refused"][""] == 1.0


def test_a_worker_that_would_not_serve_does_not_report() -> None:
    async def scenario(reporter: WorkerReporter, actor: FakeActor, service: WorkerService) -> None:
        await eventually(lambda: len(actor.calls) >= 1)
        service._step_timeout_s = -1.0  # any step is too long now
        service.streams_ended.set()
        await asyncio.sleep(0.2)
        num_calls = len(actor.calls)
        await asyncio.sleep(1.2)
        assert len(actor.calls) == num_calls

    run(scenario)


def test_a_worker_that_was_frozen_reports_when_it_has_dropped_what_was_cancelled_meanwhile(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(worker_reporter, "PUSH_PERIOD_S", 0.05)
    monkeypatch.setattr(worker_reporter, "_FROZEN_S", 0.2)
    monkeypatch.setattr(worker_reporter, "_SETTLE_S", 0.2)

    def running(snapshot: dict[str, Any]) -> float:
        value: float = snapshot["gauges"]["stallfree_num_requests_running"][""]
        return value

    async def scenario(reporter: WorkerReporter, actor: FakeActor, service: WorkerService) -> None:
        async def read() -> None:
            async for _ in service.generate(EngineRequest("r", [7], SamplingParams(max_tokens=100_000))):
                pass

        reading = asyncio.create_task(read())
        await eventually(lambda: len(actor.snapshots) > 0 and running(actor.snapshots[-1]) == 1)
        num_before = len(actor.snapshots)
        time.sleep(0.4)  # nothing runs on the event loop
        await asyncio.sleep(0.05)  # until the news that the caller has left is here
        reading.cancel()
        await eventually(lambda: len(actor.snapshots) > num_before)
        assert running(actor.snapshots[num_before]) == 0

    run(scenario)
