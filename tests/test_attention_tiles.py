"""The tiles of the Triton kernel, for every device and head size that it serves."""

import itertools

import pytest

from worker.attention.triton_tiles import MIN_KEYS, MIN_ROWS, choose_tiles, power_of_two, shared_memory_bytes

SHARED_MEMORY_KIB = {(8, 0): 163, (8, 6): 99, (8, 9): 99, (9, 0): 227, (10, 0): 227, (12, 0): 99}


@pytest.mark.parametrize("capability", SHARED_MEMORY_KIB)
def test_tiles_fit_into_shared_memory_and_hold_whole_groups(capability: tuple[int, int]) -> None:
    for head_size, num_bytes, group in itertools.product((8, 64, 80, 128, 256), (2, 4), (1, 3, 8, 20)):
        tiles = choose_tiles(capability, head_size, num_bytes, group)
        for tile in (tiles.chunk, tiles.single):
            assert shared_memory_bytes(tile, head_size, num_bytes) < SHARED_MEMORY_KIB[capability] * 1024
            assert tile.rows >= max(group, MIN_ROWS)
            assert tile.keys >= MIN_KEYS
            assert tile.rows == power_of_two(tile.rows)
            assert tile.keys == power_of_two(tile.keys)


def test_a_device_with_less_shared_memory_gets_shorter_pipelines() -> None:
    large, small = (choose_tiles(capability, 128, 2, 4).chunk for capability in ((8, 0), (8, 6)))
    assert shared_memory_bytes(large, 128, 2) > shared_memory_bytes(small, 128, 2)
    assert (large.rows, large.keys) == (small.rows, small.keys)


def test_the_interpreter_takes_small_tiles_for_every_head_size() -> None:
    assert choose_tiles(None, 256, 4, 3) == choose_tiles(None, 64, 2, 3)
    assert choose_tiles(None, 64, 2, 71).chunk.rows == 128


def test_a_power_of_two_is_not_below_its_number() -> None:
    assert [power_of_two(number) for number in (1, 2, 3, 80, 128)] == [1, 2, 4, 128, 128]
