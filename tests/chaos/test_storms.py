"""Clients that leave in masses free everything, and whoever comes next is served as ever.

One server for the module; the tests that change it come last.
"""

import asyncio
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from deployments.app import WORKER_NAME
from tests.chaos.client import ask_all
from tests.chaos.paced import Expected, body, paced_args, paced_environment
from tests.chaos.server import ChaosServer, chaos_server
from tests.server_process import wait_until

pytestmark = [pytest.mark.slow, pytest.mark.ray]

NUM_CUT = 200
NUM_LEAVERS = 50
MANY_TOKENS = 4000
FREED_TIMEOUT_S = 15.0


@pytest.fixture(scope="module")
def server(paced_folder: Path) -> Iterator[ChaosServer]:
    args = paced_args(paced_folder, 2, drain_timeout_s=30.0)
    with chaos_server(args, paced_environment(step_ms=20)) as running:
        yield running


async def connect(server: ChaosServer, asked: dict[str, Any]) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A connection that has sent a streaming request."""
    host, _, port = server.url.removeprefix("http://").partition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    content = json.dumps({**asked, "stream": True}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
    writer.write(head.encode() + f"Content-Length: {len(content)}\r\n\r\n".encode() + content)
    return reader, writer


def it_answers_as_ever(server: ChaosServer, expected: Expected) -> None:
    wait_until(server.is_idle, FREED_TIMEOUT_S)
    bodies = [body([7, 20 + i], 20) for i in range(8)]
    streams = asyncio.run(ask_all(server.url, bodies))
    assert expected.faults(bodies, streams) == []
    assert max(stream.ttft_s for stream in streams) < 2.0


def test_two_hundred_connections_cut_at_once_leave_nothing(server: ChaosServer, paced_folder: Path):
    chance = random.Random(5)

    async def cut(number: int) -> None:
        _, writer = await connect(server, body([9, 10 + number], MANY_TOKENS))
        await asyncio.sleep(chance.uniform(0.0, 0.005))
        writer.transport.abort()

    async def storm() -> None:
        await asyncio.gather(*(cut(number) for number in range(NUM_CUT)))

    asyncio.run(storm())
    it_answers_as_ever(server, Expected(paced_folder))


def test_fifty_clients_that_leave_in_mid_answer_leave_nothing(server: ChaosServer, paced_folder: Path):
    async def leave(number: int) -> None:
        reader, writer = await connect(server, body([11, 10 + number], MANY_TOKENS))
        seen = b""
        while seen.count(b"data: ") < 3 + number % 5:
            chunk = await reader.read(4096)
            assert chunk, seen
            seen += chunk
        writer.transport.abort()

    async def storm() -> None:
        await asyncio.gather(*(leave(number) for number in range(NUM_LEAVERS)))

    asyncio.run(storm())
    it_answers_as_ever(server, Expected(paced_folder))


NUM_LIVE = 30
LIVE_TOKENS = 400


def live_streams_see_nothing(server: ChaosServer, expected: Expected, number: int, change: Any) -> None:
    """`change` happens while thirty streams are under way; all end as if it had not."""
    bodies = [body([13, number, 10 + i], LIVE_TOKENS, temperature=i % 2, seed=i) for i in range(NUM_LIVE)]

    async def scenario() -> list[Any]:
        asking = asyncio.create_task(ask_all(server.url, bodies))
        await asyncio.sleep(1.5)
        await asyncio.to_thread(change)
        return await asking

    streams = asyncio.run(scenario())
    assert expected.faults(bodies, streams) == []


def test_live_streams_end_well_through_a_scale_down(server: ChaosServer, paced_folder: Path):
    live_streams_see_nothing(
        server, Expected(paced_folder), 1, lambda: server.deploy({WORKER_NAME: {"num_replicas": 1}})
    )
    wait_until(lambda: len(server.worker_pids()) == 1, FREED_TIMEOUT_S)
    it_answers_as_ever(server, Expected(paced_folder))


def test_live_streams_end_well_through_a_redeploy(server: ChaosServer, paced_folder: Path):
    before = {*server.worker_pids(), *server.ingress_pids()}
    live_streams_see_nothing(server, Expected(paced_folder), 2, lambda: server.deploy(max_num_batched_tokens=192))
    wait_until(lambda: server.application()["status"] == "RUNNING" and len(server.worker_pids()) == 2, 90.0)
    assert not before & {*server.worker_pids(), *server.ingress_pids()}
    it_answers_as_ever(server, Expected(paced_folder))
