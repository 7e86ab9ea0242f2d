"""Serve's throughput mode with HAProxy in front: streams, clients that leave and workers that die are as without it.

The flags are those of docs/serving-costs.md.
"""

import asyncio
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from benchmarks.serving import THROUGHPUT_MODE
from tests.chaos.client import Stream, ask, ask_all, session
from tests.chaos.paced import Expected, body, paced_args, paced_environment
from tests.chaos.server import ChaosServer, chaos_server
from tests.server_process import wait_until

pytestmark = [pytest.mark.slow, pytest.mark.ray]

FREED_TIMEOUT_S = 5.0


@pytest.fixture(scope="module")
def server(paced_folder: Path) -> Iterator[ChaosServer]:
    with chaos_server(paced_args(paced_folder, 2), {**paced_environment(step_ms=20), **THROUGHPUT_MODE}) as running:
        yield running


def test_haproxy_carries_thirty_streams_without_a_fault(server: ChaosServer, paced_folder: Path):
    assert any("haproxy" in process.name() for process in psutil.Process().children(recursive=True))
    bodies = [body([5 + i, 9], 60, temperature=i % 2, seed=i) for i in range(30)]
    assert Expected(paced_folder).faults(bodies, asyncio.run(ask_all(server.url, bodies))) == []


def test_a_client_that_leaves_behind_haproxy_frees_everything(server: ChaosServer):
    async def leave() -> None:
        async with session(server.url) as http:
            asking = [asyncio.create_task(ask(http, body([20 + i], 4000))) for i in range(10)]
            await asyncio.to_thread(
                wait_until, lambda: server.scrape().value("stallfree_num_requests_running") == 10, 20
            )
            for task in asking:
                task.cancel()
            await asyncio.gather(*asking, return_exceptions=True)

    asyncio.run(leave())
    wait_until(server.is_idle, FREED_TIMEOUT_S)


def test_a_worker_that_dies_behind_haproxy_costs_a_pause(server: ChaosServer, paced_folder: Path):
    bodies = [body([30 + i, 9], 200) for i in range(8)]

    async def scenario() -> list[Stream]:
        streams = [Stream() for _ in bodies]
        async with session(server.url) as http:
            asking = [asyncio.create_task(ask(http, one, stream)) for one, stream in zip(bodies, streams, strict=True)]
            while not all(stream.times_s for stream in streams):
                await asyncio.sleep(0.05)
            pids = await asyncio.to_thread(server.worker_pids)
            os.kill(pids[0], signal.SIGKILL)
            return await asyncio.gather(*asking)

    assert Expected(paced_folder).faults(bodies, asyncio.run(scenario())) == []
