"""A client that leaves, whatever its request was doing, frees everything within two seconds; `/metrics` shows it."""

import asyncio
import random
from collections.abc import Coroutine
from typing import Any

import httpx
import pytest

from tests.end_to_end.asking import MANY_TOKENS, client, completion, leave_after, streamed
from tests.end_to_end.configuration import MAX_MODEL_LEN
from tests.end_to_end.scrape import Growth, scrape, settled
from tests.server_process import ServerProcess, wait_until

pytestmark = [pytest.mark.slow, pytest.mark.ray, pytest.mark.model]

FREED_TIMEOUT_S = 2.0
SEEN_TIMEOUT_S = 20.0


def endless(index: int, num_prompt_tokens: int = 6) -> dict[str, Any]:
    return completion([100 + index] * num_prompt_tokens, MANY_TOKENS, ignore_eos=True)


def everything_is_free_in_time(server: ServerProcess) -> None:
    wait_until(lambda: scrape(server).is_idle, FREED_TIMEOUT_S)


def aborts(server: ServerProcess, work: Coroutine[Any, Any, None]) -> float:
    """How many requests were counted as left by their client while `work` went on."""
    before = settled(server)
    asyncio.run(work)
    everything_is_free_in_time(server)
    assert Growth(before, scrape(server))("stallfree_requests_total") == Growth(before, scrape(server))(
        "stallfree_requests_total", finish_reason="abort"
    )
    return Growth(before, scrape(server))("stallfree_requests_total", finish_reason="abort")


def test_a_stream_that_is_closed_frees_its_blocks(server: ServerProcess):
    async def leave() -> None:
        async with (
            client(server.url) as http,
            http.stream("POST", "/v1/completions", json={**endless(0), "stream": True}) as response,
        ):
            lines = response.aiter_lines()
            await anext(lines)
            await asyncio.to_thread(
                wait_until, lambda: scrape(server).value("stallfree_num_requests_running") == 1, SEEN_TIMEOUT_S
            )
            assert scrape(server).value("stallfree_kv_blocks_used") > 0

    assert aborts(server, leave()) == 1


def test_a_client_that_leaves_before_its_whole_answer_is_there_frees_its_blocks(server: ServerProcess):
    async def leave() -> None:
        async with client(server.url) as http:
            asking = asyncio.create_task(http.post("/v1/completions", json=endless(1)))
            await asyncio.to_thread(
                wait_until, lambda: scrape(server).value("stallfree_num_requests_running") == 1, SEEN_TIMEOUT_S
            )
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)

    assert aborts(server, leave()) == 1


def test_sixteen_clients_that_leave_at_random_moments_disturb_nobody(server: ServerProcess):
    """Aborts of requests that are waiting, mid-prompt and in the step that runs, beside one that stays."""
    chance = random.Random(20)
    stays = completion("The river that runs through Paris is", 16)

    async def undisturbed() -> str:
        async with client(server.url) as http:
            return (await streamed(http, stays)).text

    async def one(http: httpx.AsyncClient, index: int) -> None:
        try:
            async with asyncio.timeout(chance.uniform(0.05, 3.0)):
                await leave_after(http, endless(index, num_prompt_tokens=chance.randint(1, 200)), MANY_TOKENS)
        except TimeoutError:
            return

    async def rounds() -> list[str]:
        texts = []
        for _ in range(3):
            async with client(server.url) as http:
                _, stayed = await asyncio.gather(
                    asyncio.gather(*(one(http, index) for index in range(16))), streamed(http, stays)
                )
            texts.append(stayed.text)
            await asyncio.to_thread(everything_is_free_in_time, server)
        return texts

    expected = asyncio.run(undisturbed())
    assert asyncio.run(rounds()) == [expected] * 3


def test_clients_that_leave_while_they_wait_in_the_queue_free_everything(server: ServerProcess):
    """One step takes in less than one of their prompts, so most of them hold nothing when they leave."""

    async def leave() -> None:
        async with client(server.url) as http:
            asking = [
                asyncio.create_task(
                    leave_after(http, endless(index, num_prompt_tokens=MAX_MODEL_LEN - MANY_TOKENS), MANY_TOKENS)
                )
                for index in range(24)
            ]
            await asyncio.to_thread(
                wait_until, lambda: scrape(server).value("stallfree_num_requests_waiting") >= 4, SEEN_TIMEOUT_S
            )
            for task in asking:
                task.cancel()
            await asyncio.gather(*asking, return_exceptions=True)

    assert aborts(server, leave()) == 24


def test_nothing_is_lost_over_two_hundred_requests(server: ServerProcess):
    """Ended, not left: a block lost in each would show only after many."""
    before = settled(server)

    async def all_of_them() -> None:
        async with client(server.url) as http:
            for _ in range(10):
                await asyncio.gather(*(streamed(http, completion([9, 10 + i], 1 + i % 3)) for i in range(20)))

    asyncio.run(all_of_them())
    after = settled(server)
    assert after.held == before.held == [0] * 4
    assert Growth(before, after)("stallfree_requests_total") == 200
