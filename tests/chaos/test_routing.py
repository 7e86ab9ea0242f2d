"""Where requests go on living workers: to cached prefixes without a loss of balance, and less to who is slow."""

import asyncio
import random
from dataclasses import dataclass
from pathlib import Path

import pytest

from deployments.app import WORKER_NAME
from tests.chaos.client import Stream, ask_all
from tests.chaos.paced import Expected, body, paced_args, paced_environment
from tests.chaos.server import ChaosServer, chaos_server

pytestmark = [pytest.mark.slow, pytest.mark.ray]

NUM_WORKERS = 3
NUM_PREFIXES = 8
PREFIX_TOKENS = 1000
TAIL_TOKENS = 20
NUM_REQUESTS = 240
NUM_AT_ONCE = 6
ANSWER_TOKENS = 8
#: a pool that holds what runs and three of the eight prefixes
NUM_BLOCKS = 216
#: Twice as often is the claim, but what is found at random is left to chance here, a tenth more or less. Exactly, with
#: draws that are always the same: tests/test_routing.py.
MIN_GAIN = 1.75
#: of the worker that was given most requests, over the mean
MOST_UNEVEN = 1.3


@dataclass
class Routed:
    """`cached_share`: of all prompt tokens. `spread`: requests of the busiest worker over the mean."""

    cached_share: float
    spread: float
    num_by_worker: list[int]


def bodies() -> list[dict[str, object]]:
    chance = random.Random(11)
    prefixes = [[20 + number] * PREFIX_TOKENS for number in range(NUM_PREFIXES)]
    return [
        body(chance.choice(prefixes) + [5 + number % 200, 5 + number // 200] * (TAIL_TOKENS // 2), ANSWER_TOKENS)
        for number in range(NUM_REQUESTS)
    ]


def routed(server: ChaosServer, streams: list[Stream]) -> Routed:
    usages = [stream.usage for stream in streams if stream.usage is not None]
    cached = sum(usage["prompt_tokens_details"]["cached_tokens"] for usage in usages)
    counts = [len(server.request_ids(pid)) for pid in server.worker_pids()]
    return Routed(
        cached / sum(usage["prompt_tokens"] for usage in usages), max(counts) * len(counts) / sum(counts), counts
    )


def run(folder: Path, router: str | None) -> Routed:
    overrides = {WORKER_NAME: {"request_router_config": {"request_router_class": router}}} if router else None
    args = paced_args(
        folder, NUM_WORKERS, num_device_blocks=NUM_BLOCKS, max_model_len=2048, prefix_cache_secret="one for all"
    )
    with chaos_server(args, paced_environment(step_ms=20), overrides) as server:
        asked = bodies()
        streams = asyncio.run(ask_all(server.url, asked, NUM_AT_ONCE))
        assert Expected(folder).faults(asked, streams) == []
        return routed(server, streams)


def test_shared_prefixes_are_found_more_often_than_at_random_with_the_load_as_even(paced_folder: Path):
    at_random = run(paced_folder, "tests.chaos.random_router:RandomRouter")
    ours = run(paced_folder, None)
    print(f"random: {at_random}")
    print(f"ours:   {ours}")
    assert ours.cached_share >= MIN_GAIN * at_random.cached_share
    assert ours.spread <= max(MOST_UNEVEN, at_random.spread)


def test_a_worker_whose_steps_take_four_times_as_long_gets_less_in_proportion(paced_folder: Path):
    slow_rank = 2
    environment = paced_environment(20, {slow_rank: 80})
    with chaos_server(paced_args(paced_folder, NUM_WORKERS), environment) as server:
        asked = [body([30 + number, 9], 40) for number in range(150)]
        streams = asyncio.run(ask_all(server.url, asked, 12))
        assert Expected(paced_folder).faults(asked, streams) == []
        counts = sorted(routed(server, streams).num_by_worker)
        print(f"requests by worker, the slow one first: {counts}")
        # By speed it is a quarter of what the others get; but other work on the machine slows the fast ones alone.
        # Exactly, on a virtual clock: tests/test_routing.py.
        assert 0 < counts[0] < 0.6 * sum(counts[1:]) / (NUM_WORKERS - 1)
