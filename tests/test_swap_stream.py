"""Swaps that run beside the forward passes, on lanes that run late: each hazard by itself, then all of them at random.

A forward pass is work in the compute lane that reads and writes blocks of the device.
"""

import random
from collections.abc import Iterable

import pytest
import torch

from kv_cache.staged_swap import StagedSwap, runs_of
from kv_cache.tensor_pool import NUM_STAGING_SLOTS, TensorPool, slot_blocks, staging_bytes
from tests.fake_streams import FakeDevice, FakeLane, FakeMark

NUM_LAYERS, NUM_BLOCKS, NUM_HOST_BLOCKS = 2, 12, 10
SHAPE = (NUM_LAYERS, NUM_BLOCKS, NUM_HOST_BLOCKS, 2, 1, 4, torch.float32, "cpu")
BLOCK_BYTES = TensorPool.block_bytes(NUM_LAYERS, 2, 1, 4, torch.float32)


class Cache:
    """A pool whose blocks each hold one number (its negative in the values, a little more in each layer)."""

    def __init__(self, device: FakeDevice | None, slot_blocks: int = 2) -> None:
        lanes = None if device is None else device.lanes
        self.pool = TensorPool(*SHAPE, lanes=lanes, max_staging_bytes=NUM_STAGING_SLOTS * slot_blocks * BLOCK_BYTES)
        self.seen: list[float] = []
        self._compute = None if device is None else device.compute

    def forward(self, reads: Iterable[int], writes: dict[int, float]) -> None:
        """A pass that reads blocks and writes others, when its turn comes."""

        def work() -> None:
            self.seen += [self._number(block) for block in reads]
            for block, number in writes.items():
                for layer in range(NUM_LAYERS):
                    keys, values = self.pool.key_value(layer)
                    keys[block], values[block] = number + layer / 4, -number

        if self._compute is None:
            work()
        else:
            self._compute.run(work)

    def _number(self, block: int) -> float:
        number = self.pool.key_value(0)[0][block, 0, 0, 0].item()
        for layer in range(NUM_LAYERS):
            keys, values = self.pool.key_value(layer)
            whole = torch.equal(keys[block], torch.full_like(keys[block], number + layer / 4))
            if not whole or not torch.equal(values[block], torch.full_like(values[block], -number)):
                return float("nan")  # no pass has written this
        return number


def fill(cache: Cache) -> None:
    cache.forward([], {block: 100.0 + block for block in range(1, NUM_BLOCKS)})


def test_a_block_that_was_swapped_out_may_be_overwritten_by_the_pass_that_is_launched_next() -> None:
    for seed in range(20):
        device = FakeDevice(random.Random(seed))
        cache = Cache(device)
        fill(cache)
        cache.pool.swap([(1, 5), (2, 3), (3, 4)], [], [])
        cache.forward([], {1: 7.0, 2: 8.0, 3: 9.0})
        cache.pool.swap([], [(5, 6), (3, 7), (4, 8)], [])
        cache.forward([6, 7, 8, 1, 2, 3], {})
        device.drain()
        assert cache.seen == [101.0, 102.0, 103.0, 7.0, 8.0, 9.0]


def test_the_pass_that_writes_a_block_comes_before_the_swap_that_takes_it_out() -> None:
    for seed in range(20):
        device = FakeDevice(random.Random(seed))
        cache = Cache(device)
        fill(cache)
        cache.forward([], {4: 1.0})
        cache.pool.swap([(4, 0)], [], [])
        cache.pool.swap([], [(0, 9)], [])
        cache.forward([9], {})
        device.drain()
        assert cache.seen == [1.0]


def test_copies_and_the_pass_after_them_find_what_was_swapped_in() -> None:
    for seed in range(20):
        device = FakeDevice(random.Random(seed))
        cache = Cache(device)
        fill(cache)
        cache.pool.swap([(5, 0)], [], [])
        cache.pool.swap([], [(0, 1)], [(1, 2)])
        cache.forward([1, 2], {2: 3.0})
        cache.forward([1, 2], {})
        device.drain()
        assert cache.seen == [105.0, 105.0, 105.0, 3.0]


def test_a_host_block_given_away_holds_its_old_content_until_that_is_back() -> None:
    for seed in range(20):
        device = FakeDevice(random.Random(seed))
        cache = Cache(device)
        fill(cache)
        cache.pool.swap([(1, 0)], [], [])
        cache.pool.swap([], [(0, 3)], [])  # host block 0 is free, and the next step's swap takes it
        cache.pool.swap([(2, 0)], [], [])
        cache.pool.swap([], [(0, 4)], [])
        cache.forward([3, 4], {})
        device.drain()
        assert cache.seen == [101.0, 102.0]


def play(cache: Cache, rng: random.Random, device: FakeDevice | None) -> list[float]:
    """Steps as an engine launches them, several before the first has run: what passes read."""
    held = set(range(1, NUM_BLOCKS))
    on_host: set[int] = set()
    number = 0.0
    fill(cache)
    for _ in range(25):
        out: list[tuple[int, int]] = []
        into: list[tuple[int, int]] = []
        free_host = [block for block in range(NUM_HOST_BLOCKS) if block not in on_host]
        if rng.random() < 0.4 and free_host:
            count = rng.randint(1, min(len(free_host), len(held) - 1, 7))
            out = list(zip(rng.sample(sorted(held), count), rng.sample(free_host, count), strict=True))
        elif on_host:
            free = [block for block in range(1, NUM_BLOCKS) if block not in held]
            count = rng.randint(1, min(len(free), len(on_host)))
            into = list(zip(rng.sample(sorted(on_host), count), rng.sample(free, count), strict=True))
        held -= {block for block, _ in out}
        on_host |= {block for _, block in out}
        held |= {block for _, block in into}
        on_host -= {block for block, _ in into}
        copies = list(zip(*[iter(rng.sample(sorted(held), len(held) // 4 * 2))] * 2, strict=True))
        cache.pool.swap(out, into, copies)
        # The pass reads what it may, and writes blocks that it holds and blocks that were just given up.
        writes = {block: (number := number + 1.0) for block in rng.sample(sorted(held), len(held) // 2)}
        writes |= {block: (number := number + 1.0) for block, _ in out if rng.random() < 0.5}
        cache.forward(sorted(held), writes)
        if device is not None:
            device.advance()
    if device is not None:
        device.drain()
    return cache.seen


def differs(seed: int, num_slot_blocks: int, heedless: tuple[str, ...] = ()) -> bool:
    """Whether passes read something else on late lanes than where everything moves at once."""
    want = play(Cache(None), random.Random(seed), None)
    assert len(want) > 100
    assert all(number == number for number in want)
    device = FakeDevice(random.Random(-seed), heedless)
    return play(Cache(device, num_slot_blocks), random.Random(seed), device) != want


@pytest.mark.parametrize("num_slot_blocks", [1, 2, 16])
def test_passes_read_the_same_on_late_lanes_as_where_everything_moves_at_once(num_slot_blocks: int) -> None:
    assert not any(differs(seed, num_slot_blocks) for seed in range(1, 31))


@pytest.mark.parametrize("heedless", ["compute", "transfer"])
def test_a_lane_that_waits_for_nothing_is_seen(heedless: str) -> None:
    assert sum(differs(seed, 2, (heedless,)) for seed in range(1, 11)) > 5


@pytest.mark.parametrize(("caller", "lane"), [("swap_out", "compute"), ("swap_in", "transfer")])
def test_a_slot_taken_before_it_was_left_is_seen(caller: str, lane: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The waits that guard staging memory alone, each taken away while the others stay."""
    take_slot = StagedSwap._take_slot

    def take_rashly(swap: StagedSwap[FakeMark], by: FakeLane) -> int:
        if by is getattr(swap, f"_{lane}"):
            swap._left[swap._next_slot] = None
        return take_slot(swap, by)

    monkeypatch.setattr(StagedSwap, "_take_slot", take_rashly)
    assert any(differs(seed, 1) for seed in range(1, 31)), caller


def test_neighbours_on_the_host_are_one_stretch() -> None:
    assert runs_of([7, 8, 9, 3, 5, 6]) == [(0, 7, 3), (3, 3, 1), (4, 5, 2)]
    assert runs_of([]) == []


def test_staging_memory_is_bounded_and_holds_a_block_of_any_size() -> None:
    mebibyte = 2**20
    assert slot_blocks(2 * mebibyte, 4096) == 32
    assert slot_blocks(2 * mebibyte, 5) == 5
    assert slot_blocks(80 * mebibyte, 100) == 1
    assert slot_blocks(mebibyte, 0) == 0
    assert staging_bytes(2 * mebibyte, 4096) == 256 * mebibyte
    assert staging_bytes(2 * mebibyte, 0) == 0

