"""What an operator does while thirty streams are under way: scale down, redeploy, set a live option. None notices.

One server for the module; the tests go from what changes least to what changes most.
"""

import asyncio
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from deployments.app import WORKER_NAME
from tests.chaos.client import Stream, ask, ask_all, session
from tests.chaos.paced import FREED_TIMEOUT_S, Expected, body, it_answers_as_ever, paced_args, paced_environment
from tests.chaos.server import ChaosServer, chaos_server
from tests.server_process import wait_until

pytestmark = [pytest.mark.slow, pytest.mark.ray]

TOKEN_BUDGET = 512
SMALL_BUDGET = 64
STEP_S = 0.02
PROBE_TOKENS = 1000
#: what a probe takes with the small budget, in steps of it; with the whole budget it takes two or three
SLOW_PROBE_S = PROBE_TOKENS / SMALL_BUDGET * STEP_S
EFFECT_S = 1.0


@pytest.fixture(scope="module")
def server(paced_folder: Path) -> Iterator[ChaosServer]:
    args = paced_args(paced_folder, 2, drain_timeout_s=30.0, max_num_batched_tokens=TOKEN_BUDGET)
    with chaos_server(args, paced_environment(step_ms=1e3 * STEP_S)) as running:
        yield running


NUM_LIVE = 30
LIVE_TOKENS = 400


def live_streams_see_nothing(server: ChaosServer, expected: Expected, number: int, change: Callable[[], None]) -> None:
    """`change` happens while thirty streams are under way; all end as if it had not."""
    bodies = [body([13, number, 10 + i], LIVE_TOKENS, temperature=i % 2, seed=i) for i in range(NUM_LIVE)]

    async def scenario() -> list[Stream]:
        asking = asyncio.create_task(ask_all(server.url, bodies))
        await asyncio.sleep(1.5)
        await asyncio.to_thread(change)
        return await asking

    streams = asyncio.run(scenario())
    assert expected.faults(bodies, streams) == []


def test_a_user_config_takes_effect_within_a_second_in_the_same_processes(server: ChaosServer):
    pids = set(server.worker_pids())
    took_s: list[float] = []

    async def scenario() -> None:
        async with session(server.url) as http:
            probes = (body([7, 7 + number, *([8] * (PROBE_TOKENS - 2))], 1) for number in range(200))
            assert (await ask(http, next(probes))).ttft_s < SLOW_PROBE_S
            user_config = {"max_num_batched_tokens": SMALL_BUDGET, "max_num_seqs": SMALL_BUDGET}
            await asyncio.to_thread(server.deploy, {WORKER_NAME: {"user_config": user_config}})
            changed_s = time.monotonic()
            while True:
                probe = await ask(http, next(probes))
                if probe.ttft_s >= SLOW_PROBE_S:
                    took_s.append(probe.sent_s - changed_s)
                    return
                assert time.monotonic() - changed_s < 10 * EFFECT_S

    asyncio.run(scenario())
    print(f"took effect within {took_s[0]:.2f} s")
    assert took_s[0] < EFFECT_S
    assert set(server.worker_pids()) == pids


def test_live_streams_end_well_through_a_scale_down(server: ChaosServer, paced_folder: Path):
    live_streams_see_nothing(
        server, Expected(paced_folder), 1, lambda: server.deploy({WORKER_NAME: {"num_replicas": 1}})
    )
    wait_until(lambda: len(server.worker_pids()) == 1, FREED_TIMEOUT_S)
    it_answers_as_ever(server, Expected(paced_folder))


def test_live_streams_end_well_through_a_redeploy(server: ChaosServer, paced_folder: Path):
    before = {*server.worker_pids(), *server.ingress_pids()}
    live_streams_see_nothing(
        server, Expected(paced_folder), 2, lambda: server.deploy(max_num_batched_tokens=SMALL_BUDGET)
    )
    wait_until(lambda: server.application()["status"] == "RUNNING" and len(server.worker_pids()) == 2, 90.0)
    assert not before & {*server.worker_pids(), *server.ingress_pids()}
    it_answers_as_ever(server, Expected(paced_folder))
