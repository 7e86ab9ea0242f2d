"""Block tables of the sequences over a device and a host pool, as ids alone.

Every verb is all or nothing: it returns what it did, or None and changes nothing. The tensors behind the ids, and
the order in which copies run, are the tensor pool's and the scheduler's business.
"""

from enum import Enum
from math import ceil

from kv_cache.block_pool import BlockPool

#: Block 0 of the device pool is never given out: padding reads and writes it.
NULL_BLOCK = 0

BlockPairs = list[tuple[int, int]]


class AllocStatus(Enum):
    """Whether a sequence got its blocks: OK now, LATER when others release some, NEVER in this pool."""

    OK = "ok"
    LATER = "later"
    NEVER = "never"


class BlockManager:
    """Which blocks hold which tokens of which sequence.

    `num_device_blocks` includes the null block. Admissions (`allocate`, `swap_in`) leave a watermark of the device
    pool free, so that running sequences can grow; it is waived when nobody else holds blocks.
    """

    def __init__(
        self, block_size: int, num_device_blocks: int, num_host_blocks: int = 0, *, watermark: float = 0.01
    ) -> None:
        self.block_size = block_size
        self._device = BlockPool(num_device_blocks, first_id=NULL_BLOCK + 1)
        self._host = BlockPool(num_host_blocks)
        self._num_watermark_blocks = ceil(watermark * self._device.num_usable)
        self._device_tables: dict[int, list[int]] = {}
        self._host_tables: dict[int, list[int]] = {}

    @property
    def num_free_device_blocks(self) -> int:
        return self._device.num_free

    @property
    def num_used_device_blocks(self) -> int:
        return self._device.num_used

    @property
    def num_used_host_blocks(self) -> int:
        return self._host.num_used

    @property
    def num_free_host_blocks(self) -> int:
        return self._host.num_free

    @property
    def num_usable_device_blocks(self) -> int:
        return self._device.num_usable

    def num_blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def can_ever_fit(self, num_tokens: int) -> bool:
        """Whether an empty device pool could hold `num_tokens` of one sequence."""
        return self.num_blocks_for(num_tokens) <= self._device.num_usable

    def block_table(self, seq_id: int) -> list[int]:
        """The sequence's device blocks in token order: the manager's own list, to be read only."""
        return self._device_tables[seq_id]

    def num_held_blocks(self, seq_id: int) -> int:
        """Device blocks in the sequence's table; 0 where it has none."""
        return len(self._device_tables.get(seq_id, ()))

    def allocate(self, seq_id: int, num_tokens: int) -> list[int] | None:
        """A table for all `num_tokens` known tokens of a sequence that holds nothing."""
        assert seq_id not in self._device_tables
        assert seq_id not in self._host_tables
        num_blocks = self.num_blocks_for(num_tokens)
        if not self._can_admit(num_blocks):
            return None
        table = self._device.take(num_blocks)
        self._device_tables[seq_id] = table
        return table

    def append_slots(self, seq_id: int, first: int, end: int) -> BlockPairs | None:
        """Make positions [first, end) writable: grow the table, and copy blocks on write that others hold too.

        Returns the (source, destination) pairs to copy before the forward pass.
        """
        table = self._device_tables[seq_id]
        place = first // self.block_size
        if end <= len(table) * self.block_size and place == len(table) - 1 and not self._device.is_shared(table[place]):
            return []  # nearly every decode: the slot is in the last block, and the block is its own
        num_new = self.num_blocks_for(end) - len(table)
        shared = [
            place
            for place in range(first // self.block_size, min(self.num_blocks_for(end), len(table)))
            if self._device.is_shared(table[place])
        ]
        if num_new <= 0 and not shared:
            return []
        if max(num_new, 0) + len(shared) > self._device.num_free:
            return None
        copies: BlockPairs = []
        for place in shared:
            (own,) = self._device.take(1)
            copies.append((table[place], own))
            self._device.release([table[place]])
            table[place] = own
        table += self._device.take(max(num_new, 0))
        return copies

    def fork(self, parent_id: int, child_id: int) -> list[int]:
        """Give the child the parent's blocks, shared until one of them writes. Needs no room, so never fails."""
        assert child_id not in self._device_tables
        table = list(self._device_tables[parent_id])
        self._device.share(table)
        self._device_tables[child_id] = table
        return table

    def swap_out(self, num_tokens: dict[int, int]) -> BlockPairs | None:
        """Move the first `num_tokens[seq_id]` tokens of each sequence to the host; the rest of their blocks is freed.

        A block that several of them share moves once. Returns (device, host) pairs, None if the host pool is full.
        """
        kept = {seq_id: self._device_tables[seq_id][: self.num_blocks_for(n)] for seq_id, n in num_tokens.items()}
        unique = list(dict.fromkeys(block for blocks in kept.values() for block in blocks))
        if len(unique) > self._host.num_free:
            return None
        pairs = list(zip(unique, self._host.take(len(unique)), strict=True))
        self._move(pairs, kept, self._host, self._host_tables)
        for seq_id in num_tokens:
            self._device.release(self._device_tables.pop(seq_id))
        return pairs

    def swap_in(self, num_tokens: dict[int, int]) -> BlockPairs | None:
        """Bring sequences back, with room for all `num_tokens[seq_id]` known tokens of each.

        Returns (host, device) pairs, None if the device pool has not enough above the watermark.
        """
        kept = {seq_id: self._host_tables[seq_id] for seq_id in num_tokens}
        unique = list(dict.fromkeys(block for blocks in kept.values() for block in blocks))
        num_new = {s: max(self.num_blocks_for(n) - len(kept[s]), 0) for s, n in num_tokens.items()}
        if not self._can_admit(len(unique) + sum(num_new.values())):
            return None
        pairs = list(zip(unique, self._device.take(len(unique)), strict=True))
        self._move(pairs, kept, self._device, self._device_tables)
        for seq_id in num_tokens:
            self._device_tables[seq_id] += self._device.take(num_new[seq_id])
            self._host.release(self._host_tables.pop(seq_id))
        return pairs

    def free(self, seq_id: int) -> None:
        """Release what the sequence holds, wherever it is. A sequence that holds nothing is left alone."""
        table = self._device_tables.pop(seq_id, None)
        if table is not None:
            self._device.release(table)
        table = self._host_tables.pop(seq_id, None)
        if table is not None:
            self._host.release(table)

    def check_integrity(self) -> None:
        """Assert the block accounting of both pools."""
        assert not self._device_tables.keys() & self._host_tables.keys(), "a sequence is in both pools"
        self._device.check_integrity(list(self._device_tables.values()))
        self._host.check_integrity(list(self._host_tables.values()))

    def _can_admit(self, num_blocks: int) -> bool:
        reserved = self._num_watermark_blocks if self._device.num_used else 0
        return num_blocks + reserved <= self._device.num_free

    @staticmethod
    def _move(
        pairs: BlockPairs, kept: dict[int, list[int]], to: BlockPool, tables: dict[int, list[int]]
    ) -> None:
        """Write the tables of the moved sequences in the ids of pool `to`, one reference for each holder."""
        destination = dict(pairs)
        seen: set[int] = set()
        for seq_id, blocks in kept.items():
            table = [destination[block] for block in blocks]
            to.share([block for block in table if block in seen])
            seen.update(table)
            tables[seq_id] = table
