"""The router on simulated workers: cached prefixes, balance, a slow worker, several ingress processes."""

from random import Random

import pytest

from tests.simulated_workers import BLOCK_SIZE, Cluster, Worker

STEP_S = 0.02
BUDGET_TOKENS = 256
PREFIX_TOKENS = 1000
NUM_PREFIXES = 8
NUM_WORKERS = 3
#: a worker's cache has room for its share of the prefixes and what runs, not for all of them
NUM_BLOCKS = 4 * PREFIX_TOKENS // BLOCK_SIZE


def prompts_with_shared_prefixes(rng: Random, count: int) -> list[list[int]]:
    prefixes = [[rng.randrange(500) for _ in range(PREFIX_TOKENS)] for _ in range(NUM_PREFIXES)]
    return [rng.choice(prefixes) + [rng.randrange(500) for _ in range(20)] for _ in range(count)]


def prefix_cluster(monkeypatch: pytest.MonkeyPatch, *, is_random: bool) -> Cluster:
    rng = Random(1)
    workers = [Worker(f"w{number}", STEP_S, NUM_BLOCKS, BUDGET_TOKENS) for number in range(NUM_WORKERS)]
    cluster = Cluster(workers, rng, monkeypatch, is_random=is_random)
    cluster.serve(prompts_with_shared_prefixes(Random(2), 500), rate_per_s=8.0, max_tokens=16)
    return cluster


def test_shared_prefixes_are_found_twice_as_often_as_by_chance_at_equal_balance(monkeypatch: pytest.MonkeyPatch):
    routed = prefix_cluster(monkeypatch, is_random=False)
    by_chance = prefix_cluster(monkeypatch, is_random=True)
    print()
    for name, cluster in (("router", routed), ("random", by_chance)):
        requests = [len(worker.asked) for worker in cluster.workers]
        print(
            f"{name}: cached tokens {cluster.cached_share:.1%}, requests {requests}, "
            f"the busiest worker holds {cluster.spread_of_load:.2f} x the mean"
        )
    assert routed.cached_share > 2 * by_chance.cached_share
    assert routed.spread_of_load < max(by_chance.spread_of_load, 1.15)


def test_a_worker_with_four_times_the_step_time_gets_proportionally_less(monkeypatch: pytest.MonkeyPatch):
    rng = Random(3)
    workers = [Worker(name, step_s, 2000, BUDGET_TOKENS) for name, step_s in (("a", 0.02), ("b", 0.02), ("slow", 0.08))]
    cluster = Cluster(workers, rng, monkeypatch)
    prompts = [[rng.randrange(500) for _ in range(rng.randint(20, 300))] for _ in range(600)]
    cluster.serve(prompts, rate_per_s=30.0, max_tokens=20)
    shares = [len(worker.asked) / len(prompts) for worker in workers]
    print(f"\nshares of requests: {[f'{share:.1%}' for share in shares]}; by speed they would be 44%, 44%, 11%")
    assert 0.05 < shares[2] < 0.18
    assert abs(shares[0] - shares[1]) < 0.05


def test_four_ingress_processes_together_balance_about_as_well_as_one(monkeypatch: pytest.MonkeyPatch):
    spreads = {}
    for num_ingresses in (1, 4):
        rng = Random(4)
        workers = [Worker(f"w{number}", STEP_S, 2000, BUDGET_TOKENS) for number in range(4)]
        cluster = Cluster(workers, rng, monkeypatch, num_ingresses=num_ingresses)
        prompts = [[rng.randrange(500) for _ in range(rng.randint(20, 300))] for _ in range(800)]
        cluster.serve(prompts, rate_per_s=60.0, max_tokens=20)
        spreads[num_ingresses] = cluster.spread_of_load
    print(f"\nthe busiest worker's load over the mean, by number of ingresses: {spreads}")
    assert spreads[1] < 1.1
    assert spreads[4] < 1.2
