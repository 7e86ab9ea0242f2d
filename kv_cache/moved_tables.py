"""The block tables of a group that moves between the pools: what is copied, shared and copied on write. Ids alone."""

#: by sequence id
Tables = dict[int, list[int]]


def unique_blocks(tables: Tables) -> list[int]:
    """Each block once, however many of the tables hold it: it is copied once."""
    return list(dict.fromkeys(block for table in tables.values() for block in table))


def renamed(tables: Tables, new_ids: dict[int, int]) -> tuple[Tables, list[int]]:
    """The tables in the ids of the other pool, and those blocks that get a holder more, once for each."""
    moved: Tables = {}
    shared: list[int] = []
    seen: set[int] = set()
    for seq_id, blocks in tables.items():
        table = [new_ids[block] for block in blocks]
        shared += [block for block in table if block in seen]
        seen.update(table)
        moved[seq_id] = table
    return moved, shared


def num_copies_on_write(tables: Tables, num_tokens: dict[int, int], block_size: int) -> int:
    """Blocks that writing the last of each sequence's `num_tokens` will copy: all but one writer of a block do."""
    writers: dict[int, int] = {}
    for seq_id, table in tables.items():
        place = (num_tokens[seq_id] - 1) // block_size
        if place < len(table):
            writers[table[place]] = writers.get(table[place], 0) + 1
    return sum(count - 1 for count in writers.values())
