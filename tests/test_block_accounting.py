"""The accounting of the block manager: nothing is lost or given out twice, and damage is found.

A state machine plays all verbs at random and writes a value into every slot, so a block that is wrongly shared,
freed or moved shows as a wrong value.
"""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kv_cache import NULL_BLOCK, BlockManager

BLOCK_SIZE = 2
NUM_BLOCKS = 9
NUM_HOST_BLOCKS = 5


def manager(num_blocks: int, num_host_blocks: int = 0, *, block_size: int = 4, watermark: float = 0.0) -> BlockManager:
    """`num_blocks` usable device blocks."""
    return BlockManager(block_size, num_blocks + NULL_BLOCK + 1, num_host_blocks, watermark=watermark)


def test_sequences_that_forked_and_grew_leave_a_full_pool_behind() -> None:
    # vllm-project/vllm#1556: blocks shared by several candidates were freed twice.
    blocks = manager(40, block_size=2)
    blocks.allocate(0, 7)
    lengths = {0: 7}
    for child in range(1, 6):
        blocks.fork(0, child)
        lengths[child] = 7
    for round_number in range(6):
        for seq_id in list(lengths):
            assert blocks.append_slots(seq_id, lengths[seq_id], lengths[seq_id] + 1) is not None
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
        assert blocks.allocate(seq_id, seq_id % 12 + 1) is not None
        assert blocks.append_slots(seq_id, seq_id % 12 + 1, seq_id % 12 + 2) is not None
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
    blocks.allocate(1, 8)
    blocks.allocate(2, 8)
    blocks.swap_out({2: 8})
    blocks.check_integrity()
    damaged = getattr(blocks, pool)
    tables = getattr(blocks, f"{pool}_tables")
    (table,) = tables.values()
    if harm == "lost":
        damaged._free.pop()
    elif harm == "free twice":
        damaged._free.append(damaged._free[0])
    elif harm == "held and free":
        damaged._free.append(table[0])
    elif harm == "count too high":
        damaged._num_references[table[0]] += 1
    else:
        table[0] = 99
    with pytest.raises(AssertionError):
        blocks.check_integrity()


def test_check_integrity_finds_a_sequence_in_both_pools() -> None:
    blocks = manager(4, num_host_blocks=4)
    blocks.allocate(1, 4)
    blocks._host_tables[1] = blocks._host.take(1)
    with pytest.raises(AssertionError, match="both pools"):
        blocks.check_integrity()


def test_a_block_that_nobody_holds_cannot_be_released_or_shared() -> None:
    blocks = manager(4)
    table = list(blocks.allocate(1, 4) or [])
    blocks.free(1)
    with pytest.raises(AssertionError):
        blocks._device.release(table)
    with pytest.raises(AssertionError):
        blocks._device.share(table)


class BlockManagerMachine(RuleBasedStateMachine):
    """Groups of forked sequences; `values[seq_id]` is what each of its slots must hold, where it is resident."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = BlockManager(BLOCK_SIZE, NUM_BLOCKS + NULL_BLOCK + 1, NUM_HOST_BLOCKS, watermark=0.1)
        self.device: dict[tuple[int, int], int] = {}
        self.host: dict[tuple[int, int], int] = {}
        self.values: dict[int, list[int]] = {}
        self.resident: list[list[int]] = []
        self.swapped: list[list[int]] = []
        self.num_made = 0

    def _next(self) -> int:
        self.num_made += 1
        return self.num_made

    def _write(self, seq_id: int, positions: range) -> None:
        table = self.blocks.block_table(seq_id)
        for position in positions:
            value = self._next()
            self.values[seq_id][position:] = [value]
            self.device[table[position // BLOCK_SIZE], position % BLOCK_SIZE] = value

    @staticmethod
    def _copy(pairs: list[tuple[int, int]], source: dict[tuple[int, int], int], to: dict[tuple[int, int], int]) -> None:
        moved = {(d, i): source.get((s, i), 0) for s, d in pairs for i in range(BLOCK_SIZE)}
        to.update(moved)

    def _counts(self) -> tuple[int, int]:
        return self.blocks.num_free_device_blocks, self.blocks.num_free_host_blocks

    @rule(num_tokens=st.integers(1, 12))
    def allocate(self, num_tokens: int) -> None:
        seq_id, before = self._next(), self._counts()
        if self.blocks.allocate(seq_id, num_tokens) is None:
            assert self._counts() == before
            return
        self.values[seq_id] = []
        self.resident.append([seq_id])
        self._write(seq_id, range(num_tokens))

    @precondition(lambda self: self.resident)
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        group = data.draw(st.sampled_from(self.resident))
        parent, child = data.draw(st.sampled_from(group)), self._next()
        self.blocks.fork(parent, child)
        self.values[child] = list(self.values[parent])
        group.append(child)

    @precondition(lambda self: self.resident)
    @rule(data=st.data(), num_tokens=st.integers(1, 4))
    def append(self, data: st.DataObject, num_tokens: int) -> None:
        seq_id = data.draw(st.sampled_from(data.draw(st.sampled_from(self.resident))))
        first, before = len(self.values[seq_id]), self._counts()
        copies = self.blocks.append_slots(seq_id, first, first + num_tokens)
        if copies is None:
            assert self._counts() == before
            return
        self._copy(copies, self.device, self.device)
        self._write(seq_id, range(first, first + num_tokens))

    @precondition(lambda self: self.resident)
    @rule(data=st.data())
    def swap_out(self, data: st.DataObject) -> None:
        group, before = data.draw(st.sampled_from(self.resident)), self._counts()
        pairs = self.blocks.swap_out({seq_id: len(self.values[seq_id]) for seq_id in group})
        if pairs is None:
            assert self._counts() == before
            return
        assert len({source for source, _ in pairs}) == len(pairs)
        self._copy(pairs, self.device, self.host)
        self.resident.remove(group)
        self.swapped.append(group)

    @precondition(lambda self: self.swapped)
    @rule(data=st.data(), num_more=st.integers(0, 3))
    def swap_in(self, data: st.DataObject, num_more: int) -> None:
        group, before = data.draw(st.sampled_from(self.swapped)), self._counts()
        pairs = self.blocks.swap_in({seq_id: len(self.values[seq_id]) + num_more for seq_id in group})
        if pairs is None:
            assert self._counts() == before
            return
        self._copy(pairs, self.host, self.device)
        self.swapped.remove(group)
        self.resident.append(group)

    @precondition(lambda self: self.values)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        seq_id = data.draw(st.sampled_from(sorted(self.values)))
        for groups in (self.resident, self.swapped):
            for group in [group for group in groups if seq_id in group]:
                group.remove(seq_id)
                if not group:
                    groups.remove(group)
        del self.values[seq_id]
        self.blocks.free(seq_id)
        self.blocks.free(seq_id)

    @invariant()
    def every_slot_reads_what_was_written(self) -> None:
        for group in self.resident:
            for seq_id in group:
                table = self.blocks.block_table(seq_id)
                assert NULL_BLOCK not in table
                read = [
                    self.device[table[position // BLOCK_SIZE], position % BLOCK_SIZE]
                    for position in range(len(self.values[seq_id]))
                ]
                assert read == self.values[seq_id]

    @invariant()
    def the_accounting_holds(self) -> None:
        self.blocks.check_integrity()

    def teardown(self) -> None:
        for seq_id in self.values:
            self.blocks.free(seq_id)
        self.blocks.check_integrity()
        assert self._counts() == (NUM_BLOCKS, NUM_HOST_BLOCKS)


TestBlockManagerMachine = BlockManagerMachine.TestCase
TestBlockManagerMachine.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
