import pytest
import torch

from kv_cache.tensor_pool import TensorPool


def make_pool(num_host_blocks: int = 4) -> TensorPool:
    """Device block b of layer l holds l * 100 + b in its keys and the negative of that in its values."""
    pool = TensorPool(2, 6, num_host_blocks, 4, 2, 8, torch.float32, "cpu")
    for layer in range(2):
        keys, values = pool.key_value(layer)
        for block in range(6):
            keys[block] = layer * 100 + block
            values[block] = -(layer * 100 + block)
    return pool


def contents(pool: TensorPool, layer: int) -> list[float]:
    keys, values = pool.key_value(layer)
    assert torch.equal(keys, -values)
    assert torch.equal(keys, keys[:, :1, :1, :1].expand_as(keys))
    return keys[:, 0, 0, 0].tolist()


def test_a_new_pool_holds_zeros_so_that_padding_is_never_nan() -> None:
    pool = TensorPool(2, 3, 2, 4, 1, 8, torch.bfloat16, "cpu")
    for layer in range(2):
        for cache in pool.key_value(layer):
            assert cache.shape == (3, 4, 1, 8)
            assert cache.dtype == torch.bfloat16
            assert not cache.any()


def test_blocks_swapped_out_and_in_again_keep_their_contents_in_every_layer() -> None:
    pool = make_pool()
    pool.swap([(1, 3), (2, 0)], [], [])
    for layer in range(2):
        for cache in pool.key_value(layer):
            cache[1:3] = 999.0
    pool.swap([], [(3, 4), (0, 5)], [])
    for layer in range(2):
        keys, _ = pool.key_value(layer)
        assert keys[[4, 5], 0, 0, 0].tolist() == [layer * 100 + 1, layer * 100 + 2]


def test_swap_out_reads_a_block_before_swap_in_takes_its_place() -> None:
    pool = make_pool()
    pool.swap([(1, 0)], [], [])
    # Block 2 leaves for the host and block 1's contents come back into that same device block.
    pool.swap([(2, 1)], [(0, 2)], [])
    pool.swap([], [(1, 3)], [])
    assert contents(pool, 0) == [0, 1, 1, 2, 4, 5]
    assert contents(pool, 1) == [100, 101, 101, 102, 104, 105]


def test_copies_see_what_was_just_swapped_in() -> None:
    pool = make_pool()
    pool.swap([(5, 0)], [], [])
    pool.swap([], [(0, 1)], [(1, 2)])
    assert contents(pool, 1) == [100, 105, 105, 103, 104, 105]


def test_copies_of_one_call_read_all_sources_before_they_write() -> None:
    pool = make_pool()
    pool.swap([], [], [(1, 2), (2, 1)])
    assert contents(pool, 0) == [0, 2, 1, 3, 4, 5]


def test_a_pool_without_host_blocks_copies_on_the_device() -> None:
    pool = make_pool(num_host_blocks=0)
    pool.swap([], [], [(3, 1)])
    assert contents(pool, 0) == [0, 3, 2, 3, 4, 5]


def test_a_block_id_beyond_the_pool_is_an_error() -> None:
    with pytest.raises(IndexError):
        make_pool().swap([(1, 4)], [], [])


def test_block_bytes_is_what_the_tensors_take() -> None:
    pool = TensorPool(3, 5, 0, 16, 2, 8, torch.bfloat16, "cpu")
    taken = sum(cache.numel() * cache.element_size() for layer in range(3) for cache in pool.key_value(layer))
    assert taken == 5 * TensorPool.block_bytes(3, 16, 2, 8, torch.bfloat16)
