"""How large the Triton kernel's tiles are: by device, head size and bytes of a number, chosen once at start.

Pure arithmetic. Nothing is tried out while requests run, since that would make steps stutter.
"""

from dataclasses import dataclass, replace

#: what one program may use of a processor's shared memory, in bytes, by compute capability; others: the least of these
_SHARED_MEMORY_BYTES = {(8, 0): 163 * 1024, (8, 7): 163 * 1024, (9, 0): 227 * 1024, (10, 0): 227 * 1024}
_LEAST_SHARED_MEMORY_BYTES = 99 * 1024
#: Triton takes some for itself where layouts change.
_SHARE_FOR_TILES = 0.9
#: Tensor cores multiply no smaller matrices.
MIN_ROWS = 16
MIN_KEYS = 16


@dataclass(frozen=True, slots=True)
class Tile:
    """rows: queries times the query heads of a key-value head; keys; both powers of two."""

    rows: int
    keys: int
    num_warps: int = 4
    num_stages: int = 1


@dataclass(frozen=True, slots=True)
class Tiles:
    """`chunk` for rows of several queries, `single` for rows of one."""

    chunk: Tile
    single: Tile


#: Triton's interpreter works through tiles one by one: few and small, and still more than one a row.
_INTERPRETER = Tiles(Tile(64, 32), Tile(MIN_ROWS, 32))
#: (bytes of a number, head size up to) → tiles of Hopper and what came after it in data centres. The block table must
#: be read before the keys are: Triton makes a second buffer for keys and values from 5 stages on, and from 3 on where
#: it takes Hopper's asynchronous multiplications.
_HOPPER = {
    (2, 64): Tiles(Tile(128, 64, 4, 3), Tile(MIN_ROWS, 64, 4, 5)),
    (2, 128): Tiles(Tile(128, 64, 8, 3), Tile(MIN_ROWS, 64, 4, 5)),
    (2, 256): Tiles(Tile(64, 64, 8, 3), Tile(MIN_ROWS, 32, 4, 5)),
    (4, 64): Tiles(Tile(32, 32, 4, 2), Tile(MIN_ROWS, 32, 4, 2)),
    (4, 128): Tiles(Tile(32, 16, 8, 2), Tile(MIN_ROWS, 32, 8, 2)),
    (4, 256): Tiles(Tile(32, 16, 8, 2), Tile(MIN_ROWS, 16, 4, 2)),
}
_AMPERE = {
    (2, 64): Tiles(Tile(128, 64, 8, 5), Tile(MIN_ROWS, 64, 4, 5)),
    (2, 128): Tiles(Tile(128, 64, 8, 5), Tile(MIN_ROWS, 64, 4, 5)),
    (2, 256): Tiles(Tile(64, 32, 8, 5), Tile(MIN_ROWS, 32, 4, 5)),
    (4, 64): Tiles(Tile(32, 32, 4, 2), Tile(MIN_ROWS, 32, 4, 2)),
    (4, 128): Tiles(Tile(32, 32, 8, 2), Tile(MIN_ROWS, 32, 8, 2)),
    (4, 256): Tiles(Tile(32, 16, 8, 2), Tile(MIN_ROWS, 16, 4, 2)),
}


def choose_tiles(capability: tuple[int, int] | None, head_size: int, num_bytes: int, group: int) -> Tiles:
    """Tiles for heads of `head_size` numbers of `num_bytes` bytes, `group` query heads to a key-value head; capability
    None: the interpreter. A tile holds whole groups, and fits into shared memory if any tile does."""
    if capability is None:
        chosen, limit = _INTERPRETER, None
    else:
        table = _AMPERE if capability < (9, 0) else _HOPPER
        widest = next(width for width in (64, 128, 256) if head_size <= width)
        chosen = table[min(max(num_bytes, 2), 4), widest]
        limit = _SHARED_MEMORY_BYTES.get(capability, _LEAST_SHARED_MEMORY_BYTES) * _SHARE_FOR_TILES
    chunk, single = (replace(tile, rows=max(tile.rows, power_of_two(group))) for tile in (chosen.chunk, chosen.single))
    if limit is None:
        return Tiles(chunk, single)
    return Tiles(*(_fitted(tile, head_size, num_bytes, group, limit) for tile in (chunk, single)))


def shared_memory_bytes(tile: Tile, head_size: int, num_bytes: int) -> int:
    """At most: of the queries, and of the keys and values on their way."""
    width = max(power_of_two(head_size), MIN_ROWS)
    num_buffers = (tile.num_stages + 1) // 2
    return (tile.rows + 2 * num_buffers * tile.keys) * width * num_bytes


def power_of_two(number: int) -> int:
    """The least one that is not below it."""
    return 1 << (number - 1).bit_length()


def _fitted(tile: Tile, head_size: int, num_bytes: int, group: int, limit: float) -> Tile:
    while shared_memory_bytes(tile, head_size, num_bytes) > limit:
        if tile.num_stages > 2:
            tile = replace(tile, num_stages=tile.num_stages - 1)
        elif tile.keys > MIN_KEYS:
            tile = replace(tile, keys=tile.keys // 2)
        elif tile.rows > max(MIN_ROWS, power_of_two(group)):
            tile = replace(tile, rows=tile.rows // 2)
        else:
            break
    return tile
