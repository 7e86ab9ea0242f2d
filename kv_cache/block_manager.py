"""Block tables of the sequences over a device and a host pool, as ids alone.

Every verb is all or nothing: it returns what it did, or None and changes nothing. The tensors behind the ids, and
the order in which copies run, are the tensor pool's and the scheduler's business; keys come from outside.
"""

from collections import Counter
from math import ceil

from kv_cache.block_pool import BlockKey, BlockPool
from kv_cache.moved_tables import Tables, num_copies_on_write, renamed, unique_blocks
from kv_cache.table_request import AllocStatus, PrefixCounts, TableRequest

#: Block 0 of the device pool is never given out: padding reads and writes it.
NULL_BLOCK = 0

BlockPairs = list[tuple[int, int]]


class BlockManager:
    """Which blocks hold which tokens of which sequence.

    `num_device_blocks` includes the null block. Admissions (`allocate`, `swap_in`) leave a watermark of the device
    pool free, so that running sequences can grow; it is waived when nobody else holds blocks.
    """

    def __init__(
        self, block_size: int, num_device_blocks: int, num_host_blocks: int = 0, *, watermark: float = 0.01
    ) -> None:
        self.block_size = block_size
        self.num_device_blocks = num_device_blocks
        self.num_host_blocks = num_host_blocks
        self.watermark = watermark
        self.prefix_counts = PrefixCounts()
        self._device = BlockPool(num_device_blocks, first_id=NULL_BLOCK + 1)
        self._host = BlockPool(num_host_blocks)
        self._num_watermark_blocks = ceil(watermark * self._device.num_usable)
        self._device_tables: Tables = {}
        self._host_tables: Tables = {}
        #: blocks kept for the first writes of a group's sequences into the blocks they share, by its first sequence
        self._reserves: Tables = {}

    # -- counts --------------------------------------------------------------------------------------------------

    @property
    def num_free_device_blocks(self) -> int:
        """Blocks that nobody holds, those that are only cached included."""
        return self._device.num_free

    @property
    def num_used_device_blocks(self) -> int:
        return self._device.num_used

    @property
    def num_cached_device_blocks(self) -> int:
        return self._device.num_cached

    @property
    def num_used_host_blocks(self) -> int:
        return self._host.num_used

    @property
    def num_free_host_blocks(self) -> int:
        return self._host.num_free

    @property
    def num_usable_device_blocks(self) -> int:
        return self._device.num_usable

    @property
    def num_admissible_device_blocks(self) -> int:
        """Free blocks above the watermark."""
        return self._device.num_free - (self._num_watermark_blocks if self._device.num_used else 0)

    def alloc_status(self, num_blocks: int) -> AllocStatus:
        """Whether a group can have `num_blocks`, whatever more it may want to be kept free."""
        if num_blocks > self._device.num_usable:
            return AllocStatus.NEVER
        return AllocStatus.OK if num_blocks <= self.num_admissible_device_blocks else AllocStatus.LATER

    def num_blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def can_ever_fit(self, num_tokens: int, num_seqs: int = 1) -> bool:
        """Whether an empty device pool could hold `num_tokens` shared by `num_seqs` sequences about to part."""
        return self.num_blocks_for(num_tokens) + self.num_copies_for(num_tokens, num_seqs) <= self._device.num_usable

    def num_copies_for(self, num_tokens: int, num_seqs: int) -> int:
        """Blocks that `num_seqs` sequences over the same `num_tokens` copy when they first write: all but one of
        them copy a last block that is not full."""
        return num_seqs - 1 if num_tokens % self.block_size else 0

    def num_wanted_blocks(self, requests: list[TableRequest]) -> int:
        """Blocks that `requests` would take from an empty pool that has nothing cached."""
        return sum(self.num_blocks_for(r.num_tokens) - r.num_shared_blocks for r in requests)

    def num_missing_blocks(self, seq_id: int, num_tokens: int) -> int:
        """Blocks that the sequence's table lacks to cover `num_tokens`."""
        return max(self.num_blocks_for(num_tokens) - len(self._device_tables[seq_id]), 0)

    def block_table(self, seq_id: int) -> list[int]:
        """The sequence's device blocks in token order: the manager's own list, to be read only."""
        return self._device_tables[seq_id]

    def num_held_blocks(self, seq_ids: list[int]) -> int:
        """Different device blocks that these sequences hold, with what is kept for them."""
        held = {block for seq_id in seq_ids for block in self._device_tables.get(seq_id, ())}
        return len(held) + sum(len(self._reserves.get(seq_id, ())) for seq_id in seq_ids)

    def num_freed_by(self, seq_ids: list[int]) -> int:
        """Device blocks that would be free without these sequences: those that nobody else holds."""
        holders = Counter(block for seq_id in seq_ids for block in self._device_tables[seq_id])
        num_own = sum(count == self._device.num_references(block) for block, count in holders.items())
        return num_own + sum(len(self._reserves.get(seq_id, ())) for seq_id in seq_ids)

    # -- verbs ---------------------------------------------------------------------------------------------------

    def allocate(self, requests: list[TableRequest], num_reserved: int = 0, *, headroom: int = 0) -> list[int] | None:
        """Tables for the sequences of one group, and `num_reserved` blocks kept for their first `append_slots`.

        Returns for each how many of its tokens the prefix cache already holds: whole blocks, and never all tokens,
        as the last one must be computed. Cached blocks count as free, but not those that this group hits itself.
        None if fewer than `headroom` blocks above the watermark would be left.
        """
        hits = self._hits(requests)
        if self._num_needed(requests, hits) + num_reserved + headroom > self.num_admissible_device_blocks:
            return None
        for request, found in zip(requests, hits, strict=True):
            assert request.seq_id not in self._device_tables
            assert request.seq_id not in self._host_tables
            self._device.hold(found)
            num_shared = request.num_shared_blocks
            self.prefix_counts.num_queried_blocks += max(len(request.block_keys) - num_shared, 0)
            self.prefix_counts.num_hit_blocks += max(len(found) - num_shared, 0)
        for request, found in zip(requests, hits, strict=True):
            table = list(found)
            if request.num_shared_blocks and not found:
                table = self._device_tables[requests[request.shared_with].seq_id][: request.num_shared_blocks]
                self._device.hold(table)
            table += self._device.take(self.num_blocks_for(request.num_tokens) - len(table))
            self._device_tables[request.seq_id] = table
        if num_reserved:
            self._reserves[requests[0].seq_id] = self._device.take(num_reserved)
        return [len(found) * self.block_size for found in hits]

    def num_needed_blocks(self, requests: list[TableRequest]) -> int:
        """Free blocks that `allocate` would take for `requests` as things stand, cached ones that it hits included."""
        return self._num_needed(requests, self._hits(requests))

    def append_slots(self, seq_id: int, position: int) -> BlockPairs | None:
        """Make `position` of one sequence writable: grow its table by a block, or copy on write one that others hold.

        Returns the (source, destination) pairs to copy before the forward pass.
        """
        table = self._device_tables[seq_id]
        place = position // self.block_size
        if place < len(table):
            if self._device.num_references(table[place]) == 1:
                return []
        elif self._device.num_free:
            table += self._device.take(1)
            return []
        return self.append_group_slots([(seq_id, position)])

    def append_group_slots(self, slots: list[tuple[int, int]]) -> BlockPairs | None:
        """`append_slots` for the (sequence id, position) pairs of a group: for all of them or for none.

        Takes what `allocate` has kept for the group first, and gives the rest of it back.
        """
        references: dict[int, int] = {}
        num_needed = 0
        for seq_id, position in slots:
            table = self._device_tables[seq_id]
            place = position // self.block_size
            if place == len(table):
                num_needed += 1
                continue
            block = table[place]
            left = references.get(block, self._device.num_references(block))
            num_needed += left > 1
            references[block] = left - 1
        reserves = [reserve for seq_id, _ in slots if (reserve := self._reserves.get(seq_id))]
        if num_needed > self._device.num_free + sum(map(len, reserves)):
            return None
        for seq_id, _ in slots:
            self._device.release(self._reserves.pop(seq_id, []))
        copies: BlockPairs = []
        for seq_id, position in slots:
            table = self._device_tables[seq_id]
            place = position // self.block_size
            if place == len(table):
                table += self._device.take(1)
            elif self._device.num_references(table[place]) > 1:
                (own,) = self._device.take(1)
                copies.append((table[place], own))
                self._device.release([table[place]])
                table[place] = own
        return copies

    def fork(self, parent_id: int, child_id: int) -> None:
        """Give the child the parent's blocks, shared until one of them writes. Needs no room, so never fails."""
        assert child_id not in self._device_tables
        table = list(self._device_tables[parent_id])
        self._device.hold(table)
        self._device_tables[child_id] = table

    def publish(self, seq_id: int, first_block: int, block_keys: list[BlockKey]) -> None:
        """Name the sequence's blocks from `first_block` on. They are full, and their tokens are computed."""
        table = self._device_tables[seq_id]
        for place, key in enumerate(block_keys, first_block):
            self._device.publish(table[place], key)

    def swap_out(self, num_tokens: dict[int, int]) -> BlockPairs | None:
        """Move the first `num_tokens[seq_id]` tokens of each sequence to the host; the rest of their blocks is freed.

        A block that several of them share moves once. Returns (device, host) pairs, None if the host pool is full.
        """
        kept = {seq_id: self._device_tables[seq_id][: self.num_blocks_for(n)] for seq_id, n in num_tokens.items()}
        unique = unique_blocks(kept)
        if len(unique) > self._host.num_free:
            return None
        pairs = list(zip(unique, self._host.take(len(unique)), strict=True))
        moved, shared = renamed(kept, dict(pairs))
        self._host.hold(shared)
        self._host_tables |= moved
        for seq_id in num_tokens:
            self._device.release(self._device_tables.pop(seq_id) + self._reserves.pop(seq_id, []))
        return pairs

    def swap_in(self, num_tokens: dict[int, int], num_reserved: int = 0, *, headroom: int = 0) -> BlockPairs | None:
        """Bring a group back, with room for all `num_tokens[seq_id]` known tokens of each sequence.

        Blocks to copy on the next write of a sequence, and `num_reserved` more, are kept for its `append_slots`.
        Returns (host, device) pairs, None if fewer than `headroom` device blocks above the watermark would be left.
        """
        kept = {seq_id: self._host_tables[seq_id] for seq_id in num_tokens}
        if self.num_swapped_blocks_wanted(num_tokens, num_reserved) + headroom > self.num_admissible_device_blocks:
            return None
        unique = unique_blocks(kept)
        pairs = list(zip(unique, self._device.take(len(unique)), strict=True))
        moved, shared = renamed(kept, dict(pairs))
        self._device.hold(shared)
        self._device_tables |= moved
        for seq_id, count in num_tokens.items():
            self._device_tables[seq_id] += self._device.take(self.num_missing_blocks(seq_id, count))
            self._host.release(self._host_tables.pop(seq_id))
        num_reserved += num_copies_on_write(kept, num_tokens, self.block_size)
        if num_reserved:
            self._reserves[next(iter(num_tokens))] = self._device.take(num_reserved)
        return pairs

    def num_swapped_blocks_wanted(self, num_tokens: dict[int, int], num_reserved: int = 0) -> int:
        """Device blocks that `swap_in` with these arguments needs."""
        kept = {seq_id: self._host_tables[seq_id] for seq_id in num_tokens}
        num_new = sum(max(self.num_blocks_for(n) - len(kept[s]), 0) for s, n in num_tokens.items())
        num_copies = num_copies_on_write(kept, num_tokens, self.block_size)
        return len(unique_blocks(kept)) + num_new + num_reserved + num_copies

    def free(self, seq_id: int) -> None:
        """Release what the sequence holds, wherever it is. A sequence that holds nothing is left alone."""
        self._device.release(self._reserves.pop(seq_id, []))
        self._device.release(self._device_tables.pop(seq_id, []))
        self._host.release(self._host_tables.pop(seq_id, []))

    def check_integrity(self) -> None:
        """Assert the block accounting of both pools."""
        assert not self._device_tables.keys() & self._host_tables.keys(), "a sequence is in both pools"
        assert self._reserves.keys() <= self._device_tables.keys(), "blocks are kept for nobody"
        self._device.check_integrity([*self._device_tables.values(), *self._reserves.values()])
        self._host.check_integrity(list(self._host_tables.values()))

    def _hits(self, requests: list[TableRequest]) -> list[list[int]]:
        """Cached blocks for each request; none where it shares at least as many with another one."""
        hits: list[list[int]] = []
        for request in requests:
            found = self._device.find(request.block_keys[: (request.num_tokens - 1) // self.block_size])
            hits.append(found if len(found) >= request.num_shared_blocks else [])
        return hits

    def _num_needed(self, requests: list[TableRequest], hits: list[list[int]]) -> int:
        num_new = sum(
            self.num_blocks_for(request.num_tokens) - max(len(found), request.num_shared_blocks)
            for request, found in zip(requests, hits, strict=True)
        )
        return num_new + len({block for found in hits for block in found if not self._device.num_references(block)})
