"""A block manager, and tables of single sequences, in one line each."""

from kv_cache import NULL_BLOCK, BlockManager, BlockPairs, TableRequest


def manager(num_blocks: int, num_host_blocks: int = 0, *, block_size: int = 4, watermark: float = 0.0) -> BlockManager:
    """`num_blocks` usable device blocks."""
    return BlockManager(block_size, num_blocks + NULL_BLOCK + 1, num_host_blocks, watermark=watermark)


def allocate(blocks: BlockManager, seq_id: int, num_tokens: int) -> list[int] | None:
    """The table of one sequence that shares nothing and finds nothing."""
    if blocks.allocate([TableRequest(seq_id, num_tokens)]) is None:
        return None
    return blocks.block_table(seq_id)


def append(blocks: BlockManager, seq_id: int, first: int, end: int) -> BlockPairs:
    """Make the positions [first, end) writable, one after the other; there must be room."""
    copies: BlockPairs = []
    for position in range(first, end):
        pairs = blocks.append_slots(seq_id, position)
        assert pairs is not None, "no block is left"
        copies += pairs
    return copies
