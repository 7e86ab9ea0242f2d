"""One pool of block ids with reference counts. Knows neither sequences nor tensors."""


class BlockPool:
    """Ids `first_id .. num_blocks - 1`. A block is free, or held by as many tables as its reference count says."""

    def __init__(self, num_blocks: int, *, first_id: int = 0) -> None:
        self.first_id = first_id
        self.num_usable = max(num_blocks - first_id, 0)
        self._free = list(range(num_blocks - 1, first_id - 1, -1))
        self._num_references = [0] * num_blocks

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_used(self) -> int:
        return self.num_usable - len(self._free)

    def take(self, count: int) -> list[int]:
        """`count` free blocks, each with one reference. The caller has checked `num_free`."""
        assert count <= len(self._free)
        if count == 0:
            return []
        taken = self._free[-count:]
        del self._free[-count:]
        for block in taken:
            self._num_references[block] = 1
        return taken

    def share(self, blocks: list[int]) -> None:
        """One more holder for each of `blocks`."""
        for block in blocks:
            assert self._num_references[block] > 0
            self._num_references[block] += 1

    def is_shared(self, block: int) -> bool:
        return self._num_references[block] > 1

    def release(self, blocks: list[int]) -> None:
        """One holder less for each of `blocks`; those without holders are free again."""
        references = self._num_references
        for block in blocks:
            assert references[block] > 0
            references[block] -= 1
            if references[block] == 0:
                self._free.append(block)

    def check_integrity(self, tables: list[list[int]]) -> None:
        """Assert that reference counts are those of `tables` and that free + used = total."""
        counted = [0] * len(self._num_references)
        for table in tables:
            for block in table:
                assert self.first_id <= block < len(counted), f"block {block} is outside the pool"
                counted[block] += 1
        assert counted == self._num_references, "reference counts differ from the block tables"
        free = set(self._free)
        assert len(free) == len(self._free), "a block is free twice"
        held = {block for block, count in enumerate(counted) if count}
        assert not held & free, "a held block is free"
        assert len(held) + len(free) == self.num_usable, "a block is lost"
