"""Clients that leave in masses free everything, and whoever comes next is served as ever."""

import asyncio
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.chaos.paced import Expected, body, it_answers_as_ever, paced_args, paced_environment
from tests.chaos.server import ChaosServer, chaos_server

pytestmark = [pytest.mark.slow, pytest.mark.ray]

NUM_CUT = 200
NUM_LEAVERS = 50
MANY_TOKENS = 4000


@pytest.fixture(scope="module")
def server(paced_folder: Path) -> Iterator[ChaosServer]:
    args = paced_args(paced_folder, 2)
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
