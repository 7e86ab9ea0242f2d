"""The block manager: every verb does all or nothing, and the accounting holds after each."""

from kv_cache import NULL_BLOCK, BlockManager
from tests.block_managing import allocate, append, manager


def state(blocks: BlockManager, *seq_ids: int) -> tuple[object, ...]:
    tables = tuple(tuple(blocks.block_table(seq_id)) for seq_id in seq_ids)
    return (*tables, blocks.num_used_device_blocks, blocks.num_used_host_blocks)


def test_a_table_covers_all_tokens_and_holds_no_block_twice() -> None:
    blocks = manager(4)
    table = allocate(blocks, 1, 9)
    assert table is not None
    assert len(table) == len(set(table)) == 3
    assert blocks.num_used_device_blocks == 3
    assert blocks.num_free_device_blocks == 1
    assert blocks.num_held_blocks([1]) == 3
    assert blocks.num_held_blocks([2]) == 0


def test_allocate_takes_nothing_when_it_cannot_take_all() -> None:
    blocks = manager(4)
    allocate(blocks, 1, 8)
    before = state(blocks, 1)
    assert allocate(blocks, 2, 9) is None
    assert state(blocks, 1) == before
    assert blocks.num_held_blocks([2]) == 0
    blocks.check_integrity()


def test_the_null_block_is_never_given_out() -> None:
    blocks = manager(5, num_host_blocks=5)
    table = allocate(blocks, 1, 20)
    assert table is not None
    assert sorted(table) == [1, 2, 3, 4, 5]
    pairs = blocks.swap_out({1: 20})
    assert pairs is not None
    assert sorted(host for _, host in pairs) == [0, 1, 2, 3, 4]
    back = blocks.swap_in({1: 20})
    assert back is not None
    assert NULL_BLOCK not in {device for _, device in back}


def test_can_ever_fit_counts_usable_blocks_and_ignores_who_holds_them() -> None:
    blocks = manager(4)
    allocate(blocks, 1, 16)
    assert blocks.can_ever_fit(16)
    assert not blocks.can_ever_fit(17)


def test_admission_leaves_the_watermark_free_for_those_who_run() -> None:
    blocks = manager(10, watermark=0.2)
    allocate(blocks, 1, 4)
    assert allocate(blocks, 2, 4 * 8) is None
    assert allocate(blocks, 3, 4 * 7) is not None
    assert append(blocks, 1, 4, 4 * 3) == []
    assert blocks.num_free_device_blocks == 0


def test_the_watermark_is_waived_when_nobody_else_holds_blocks() -> None:
    blocks = manager(10, num_host_blocks=10, watermark=0.5)
    assert allocate(blocks, 1, 40) is not None
    assert blocks.swap_out({1: 40}) is not None
    assert blocks.swap_in({1: 40}) is not None


def test_swap_in_respects_the_watermark() -> None:
    blocks = manager(10, num_host_blocks=10, watermark=0.2)
    allocate(blocks, 1, 4 * 8)
    blocks.swap_out({1: 4 * 8})
    allocate(blocks, 2, 4)
    assert blocks.swap_in({1: 4 * 8}) is None
    assert blocks.num_used_host_blocks == 8
    blocks.free(2)
    assert blocks.swap_in({1: 4 * 8}) is not None


def test_a_slot_within_the_last_block_takes_no_block() -> None:
    blocks = manager(2)
    allocate(blocks, 1, 5)
    assert append(blocks, 1, 5, 8) == []
    assert blocks.num_held_blocks([1]) == 2


def test_append_grows_by_as_many_blocks_as_the_slots_need() -> None:
    blocks = manager(5)
    allocate(blocks, 1, 4)
    assert append(blocks, 1, 4, 17) == []
    assert blocks.num_held_blocks([1]) == 5


def test_append_changes_nothing_when_it_cannot_have_all() -> None:
    blocks = manager(3)
    allocate(blocks, 1, 6)
    blocks.fork(1, 2)
    blocks.fork(1, 3)
    before = state(blocks, 1, 2, 3)
    # There is a block for the first copy, and none for the second.
    assert blocks.append_group_slots([(1, 6), (2, 6), (3, 6)]) is None
    assert state(blocks, 1, 2, 3) == before
    blocks.check_integrity()


def test_fork_takes_no_block_and_shares_all() -> None:
    blocks = manager(2)
    table = allocate(blocks, 1, 8)
    blocks.fork(1, 2)
    assert blocks.block_table(2) == table
    assert blocks.num_used_device_blocks == 2
    blocks.free(1)
    assert blocks.num_used_device_blocks == 2
    blocks.free(2)
    assert blocks.num_used_device_blocks == 0


def test_a_write_to_a_shared_block_copies_it_once_and_the_last_sharer_owns_it() -> None:
    blocks = manager(5)
    allocate(blocks, 1, 6)
    blocks.fork(1, 2)
    full, shared = blocks.block_table(1)
    copies = append(blocks, 2, 6, 7)
    assert copies is not None
    ((source, destination),) = copies
    assert source == shared
    assert blocks.block_table(2) == [full, destination]
    assert blocks.block_table(1) == [full, shared]
    assert append(blocks, 1, 6, 7) == []
    assert append(blocks, 2, 7, 8) == []
    assert blocks.block_table(1) == [full, shared]
    blocks.check_integrity()


def test_a_full_shared_block_stays_shared_when_both_grow() -> None:
    blocks = manager(4)
    allocate(blocks, 1, 4)
    blocks.fork(1, 2)
    assert append(blocks, 1, 4, 5) == []
    assert append(blocks, 2, 4, 5) == []
    assert blocks.block_table(1)[0] == blocks.block_table(2)[0]
    assert blocks.block_table(1)[1] != blocks.block_table(2)[1]


def test_swap_out_moves_what_is_computed_and_frees_the_rest() -> None:
    blocks = manager(5, num_host_blocks=5)
    table = list(allocate(blocks, 1, 17) or [])
    pairs = blocks.swap_out({1: 6})
    assert pairs is not None
    assert [device for device, _ in pairs] == table[:2]
    assert blocks.num_used_device_blocks == 0
    assert blocks.num_used_host_blocks == 2
    assert blocks.num_held_blocks([1]) == 0


def test_swap_in_makes_room_for_all_known_tokens() -> None:
    blocks = manager(5, num_host_blocks=5)
    allocate(blocks, 1, 6)
    out = blocks.swap_out({1: 6})
    back = blocks.swap_in({1: 17})
    assert out is not None
    assert back is not None
    assert [host for host, _ in back] == [host for _, host in out]
    assert blocks.num_held_blocks([1]) == 5
    assert blocks.block_table(1)[:2] == [device for _, device in back]
    assert blocks.num_used_host_blocks == 0


def test_swap_in_without_room_for_the_known_tokens_moves_nothing() -> None:
    blocks = manager(5, num_host_blocks=5)
    allocate(blocks, 1, 6)
    blocks.swap_out({1: 6})
    allocate(blocks, 2, 4)
    assert blocks.swap_in({1: 17}) is None
    assert blocks.num_used_host_blocks == 2
    assert blocks.num_used_device_blocks == 1
    blocks.check_integrity()


def test_a_full_host_pool_refuses_the_whole_swap() -> None:
    blocks = manager(4, num_host_blocks=2)
    allocate(blocks, 1, 12)
    before = state(blocks, 1)
    assert blocks.swap_out({1: 12}) is None
    assert state(blocks, 1) == before
    blocks.check_integrity()


def test_a_group_swaps_its_shared_blocks_once_and_shares_them_afterwards() -> None:
    blocks = manager(5, num_host_blocks=3)
    allocate(blocks, 1, 6)
    blocks.fork(1, 2)
    append(blocks, 2, 6, 7)
    out = blocks.swap_out({1: 6, 2: 7})
    assert out is not None
    assert len(out) == blocks.num_used_host_blocks == 3
    assert blocks.num_used_device_blocks == 0
    back = blocks.swap_in({1: 6, 2: 7})
    assert back is not None
    assert len(back) == blocks.num_used_device_blocks == 3
    assert blocks.block_table(1)[0] == blocks.block_table(2)[0]
    assert blocks.block_table(1)[1] != blocks.block_table(2)[1]
    blocks.free(1)
    blocks.free(2)
    assert blocks.num_used_device_blocks == 0


def test_free_releases_host_blocks_too() -> None:
    blocks = manager(2, num_host_blocks=2)
    allocate(blocks, 1, 8)
    blocks.swap_out({1: 8})
    blocks.free(1)
    assert blocks.num_used_host_blocks == 0
    blocks.check_integrity()


def test_a_second_free_and_a_free_of_an_unknown_sequence_change_nothing() -> None:
    blocks = manager(4)
    allocate(blocks, 1, 8)
    blocks.free(1)
    allocate(blocks, 2, 8)
    before = state(blocks, 2)
    blocks.free(1)
    blocks.free(99)
    assert state(blocks, 2) == before
    blocks.check_integrity()
