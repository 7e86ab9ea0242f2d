"""The accounting of the block manager: nothing is lost or given out twice, and damage is found."""

import pytest

from kv_cache import TableRequest
from tests.block_managing import allocate, append, manager


def test_sequences_that_forked_and_grew_leave_a_full_pool_behind() -> None:
    # vllm-project/vllm#1556: blocks shared by several candidates were freed twice.
    blocks = manager(40, block_size=2)
    allocate(blocks, 0, 7)
    lengths = {0: 7}
    for child in range(1, 6):
        blocks.fork(0, child)
        lengths[child] = 7
    for round_number in range(6):
        for seq_id in list(lengths):
            append(blocks, seq_id, lengths[seq_id], lengths[seq_id] + 1)
            lengths[seq_id] += 1
            blocks.check_integrity()
        loser, winner = round_number % 6, (round_number + 1) % 6
        blocks.free(loser)
        blocks.fork(winner, loser)
        lengths[loser] = lengths[winner]
        blocks.check_integrity()
    for seq_id in lengths:
        blocks.free(seq_id)
        blocks.free(seq_id)
    blocks.check_integrity()
    assert blocks.num_free_device_blocks == 40


def test_hundreds_of_requests_lose_no_block() -> None:
    # kekzl/imp#1115: one block was lost with each request.
    blocks = manager(4, num_host_blocks=4)
    for seq_id in range(300):
        assert blocks.allocate([TableRequest(seq_id, seq_id % 12 + 1, [str(seq_id % 5).encode()])]) is not None
        append(blocks, seq_id, seq_id % 12 + 1, seq_id % 12 + 2)
        blocks.publish(seq_id, 0, [str(seq_id % 5).encode()])
        if seq_id % 3 == 0:
            assert blocks.swap_out({seq_id: 1}) is not None
        if seq_id % 6 == 0:
            assert blocks.swap_in({seq_id: 5}) is not None
        blocks.free(seq_id)
    assert blocks.num_free_device_blocks == 4
    assert blocks.num_free_host_blocks == 4
    blocks.check_integrity()


@pytest.mark.parametrize("pool", ["_device", "_host"])
@pytest.mark.parametrize("harm", ["lost", "free twice", "held and free", "count too high", "foreign"])
def test_check_integrity_finds_planted_corruption(pool: str, harm: str) -> None:
    blocks = manager(6, num_host_blocks=6)
    allocate(blocks, 1, 8)
    allocate(blocks, 2, 8)
    blocks.swap_out({2: 8})
    blocks.check_integrity()
    damaged = getattr(blocks, pool)
    tables = getattr(blocks, f"{pool}_tables")
    (table,) = tables.values()
    if harm == "lost":
        damaged._empty.pop()
    elif harm == "free twice":
        damaged._empty.append(damaged._empty[0])
    elif harm == "held and free":
        damaged._empty.append(table[0])
    elif harm == "count too high":
        damaged._num_references[table[0]] += 1
    else:
        table[0] = 99
    with pytest.raises(AssertionError):
        blocks.check_integrity()


@pytest.mark.parametrize("harm", ["cached and held", "empty and found", "cached and nameless", "two names"])
def test_check_integrity_finds_a_damaged_prefix_index(harm: str) -> None:
    blocks = manager(6)
    for seq_id, key in ((1, b"held"), (2, b"cached")):
        allocate(blocks, seq_id, 4)
        blocks.publish(seq_id, 0, [key])
    blocks.free(2)
    blocks.check_integrity()
    pool = blocks._device
    held, cached = pool._block_of_key[b"held"], pool._block_of_key[b"cached"]
    if harm == "cached and held":
        pool._cached[held] = None
    elif harm == "empty and found":
        del pool._cached[cached]
        pool._empty.append(cached)
    elif harm == "cached and nameless":
        del pool._key_of_block[cached]
    else:
        pool._block_of_key[b"another"] = held
    with pytest.raises(AssertionError):
        blocks.check_integrity()


def test_check_integrity_finds_a_sequence_in_both_pools() -> None:
    blocks = manager(4, num_host_blocks=4)
    allocate(blocks, 1, 4)
    blocks._host_tables[1] = blocks._host.take(1)
    with pytest.raises(AssertionError, match="both pools"):
        blocks.check_integrity()


def test_check_integrity_finds_blocks_that_are_kept_for_nobody() -> None:
    blocks = manager(4)
    blocks.allocate([TableRequest(1, 4)], num_reserved=2)
    blocks._reserves[7] = blocks._reserves.pop(1)
    with pytest.raises(AssertionError, match="nobody"):
        blocks.check_integrity()


def test_a_block_that_nobody_holds_cannot_be_released_or_shared() -> None:
    blocks = manager(4)
    table = list(allocate(blocks, 1, 4) or [])
    blocks.free(1)
    with pytest.raises(AssertionError):
        blocks._device.release(table)
    with pytest.raises(KeyError):
        blocks._device.hold(table)
    with pytest.raises(AssertionError):
        blocks._device.publish(table[0], b"key")
