"""One pool of block ids: reference counts, and which free blocks still hold something worth finding.

Knows neither sequences nor tensors nor how keys are made.
"""

from collections import OrderedDict

#: names the content of a full block: a keyed hash chain over (parent, tokens, adapter, salt), computed outside
BlockKey = bytes


class BlockPool:
    """Ids `first_id .. num_blocks - 1`. A block is held by as many tables as its reference count says, or free.

    A published block can be found by its key, held or free. Free published blocks are given away last, the least
    recently used first; from then on their key finds nothing.
    """

    def __init__(self, num_blocks: int, *, first_id: int = 0) -> None:
        self.first_id = first_id
        self.num_usable = max(num_blocks - first_id, 0)
        self._empty = list(range(num_blocks - 1, first_id - 1, -1))
        self._cached: OrderedDict[int, None] = OrderedDict()
        self._num_references = [0] * num_blocks
        self._key_of_block: dict[int, BlockKey] = {}
        self._block_of_key: dict[BlockKey, int] = {}

    @property
    def num_free(self) -> int:
        """Blocks that nobody holds, those that are only cached included."""
        return len(self._empty) + len(self._cached)

    @property
    def num_used(self) -> int:
        return self.num_usable - self.num_free

    @property
    def num_cached(self) -> int:
        """Free blocks that can still be found by their key."""
        return len(self._cached)

    def take(self, count: int) -> list[int]:
        """`count` free blocks, each with one reference. The caller has checked `num_free`."""
        assert count <= self.num_free
        if count == 1 and self._empty:
            taken = [self._empty.pop()]
        elif count == 0:
            return []
        else:
            num_empty = min(count, len(self._empty))
            # In the order in which single ones would be taken: neighbours then follow each other in a table, and the
            # memory behind them is read as a stream.
            taken = self._empty[: -num_empty - 1 : -1]
            del self._empty[len(self._empty) - num_empty :]
            for _ in range(count - num_empty):
                block, _nothing = self._cached.popitem(last=False)
                del self._block_of_key[self._key_of_block.pop(block)]
                taken.append(block)
        for block in taken:
            self._num_references[block] = 1
        return taken

    def hold(self, blocks: list[int]) -> None:
        """One more holder for each of `blocks`, which are held already or cached."""
        for block in blocks:
            if self._num_references[block] == 0:
                del self._cached[block]
            self._num_references[block] += 1

    def num_references(self, block: int) -> int:
        return self._num_references[block]

    def release(self, blocks: list[int]) -> None:
        """One holder less for each of `blocks`, last one first: a prefix outlives what continues it."""
        references = self._num_references
        for block in reversed(blocks):
            assert references[block] > 0
            references[block] -= 1
            if references[block] == 0:
                if block in self._key_of_block:
                    self._cached[block] = None
                else:
                    self._empty.append(block)

    def publish(self, block: int, key: BlockKey) -> None:
        """Make a held block findable. The first block with a key keeps it: a second copy is just a block."""
        assert self._num_references[block] > 0
        if key not in self._block_of_key and block not in self._key_of_block:
            self._block_of_key[key] = block
            self._key_of_block[block] = key

    def find(self, keys: list[BlockKey]) -> list[int]:
        """The blocks of the longest run of `keys`, from the first on, that can be found."""
        found: list[int] = []
        for key in keys:
            block = self._block_of_key.get(key)
            if block is None:
                break
            found.append(block)
        return found

    def check_integrity(self, tables: list[list[int]]) -> None:
        """Assert that reference counts are those of `tables`, and that free + used = total."""
        counted = [0] * len(self._num_references)
        for table in tables:
            for block in table:
                assert self.first_id <= block < len(counted), f"block {block} is outside the pool"
                counted[block] += 1
        assert counted == self._num_references, "reference counts differ from the block tables"
        empty, cached = set(self._empty), set(self._cached)
        assert len(empty) == len(self._empty), "a block is free twice"
        held = {block for block, count in enumerate(counted) if count}
        assert not held & (empty | cached), "a held block is free"
        assert not empty & cached, "a block is empty and cached"
        assert len(held) + self.num_free == self.num_usable, "a block is lost"
        assert not empty & self._key_of_block.keys(), "an empty block can be found"
        assert cached <= self._key_of_block.keys(), "a cached block cannot be found"
        assert {key: block for block, key in self._key_of_block.items()} == self._block_of_key
