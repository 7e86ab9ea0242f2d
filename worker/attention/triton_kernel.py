"""Three Triton kernels: paged attention of mixed rows, what joins its split rows, and the way of new keys into slots.

They know pointers, strides and sizes. Importing this file needs the package `triton`; under TRITON_INTERPRET=1, set
before triton is first imported, they run on CPU tensors.

One program of `attend` is one tile: queries of one row, times the query heads that share a key-value head, against the
keys that any of them sees, softmax kept as it goes (FlashAttention, Dao 2022 and 2023). Nothing past a row's own keys
or before its window is ever loaded, so what another request left in a block cannot show.
"""

import triton
import triton.language as tl

#: Sizes of a step. Were they specialised, a step of another size would compile the kernel again.
_SIZES = ("num_rows", "table_width", "num_splits")

_LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def _row_of(tile, query_start_locs, num_rows, TILE_QUERIES: tl.constexpr):
    """The row whose queries tile number `tile` holds. Row r's tiles begin at query_start_locs[r] // TILE_QUERIES + r:
    so each row has enough of them, whatever its length, and their number follows from the batch's sizes alone."""
    low = 0
    high = num_rows
    while low < high:
        middle = (low + high) // 2
        first_tile = tl.load(query_start_locs + middle).to(tl.int32) // TILE_QUERIES + middle
        if first_tile <= tile:
            low = middle + 1
        else:
            high = middle
    return low - 1


@triton.jit(do_not_specialize=_SIZES)
def attend(
    output,  # [T, heads, HEAD_SIZE], contiguous
    part_sums,  # float32 [R, heads, num_splits, PADDED_HEAD]: what each part alone would have answered
    part_logs,  # float32 [R, heads, num_splits]: the logarithm (base 2) of each part's softmax denominator
    query,  # [T, heads, HEAD_SIZE]
    keys,
    values,  # [blocks, BLOCK_SIZE, kv_heads, HEAD_SIZE]
    block_tables,  # [R, table_width]
    query_start_locs,  # [R + 1]
    context_lens,  # [R]
    scale,
    num_rows,
    table_width,
    num_splits,
    query_stride,
    query_head_stride,
    output_stride,
    block_stride,
    slot_stride,
    head_stride,
    HEAD_SIZE: tl.constexpr,
    PADDED_HEAD: tl.constexpr,  # the next power of two
    BLOCK_SIZE: tl.constexpr,
    GROUP: tl.constexpr,  # query heads of a key-value head
    TILE_ROWS: tl.constexpr,  # queries x GROUP
    TILE_KEYS: tl.constexpr,
    WINDOW: tl.constexpr,  # 0: none
    SOFTCAP: tl.constexpr,  # 0.0: none
    IS_SINGLE: tl.constexpr,  # rows of one query, a program for each; else all others
    IS_SPLIT: tl.constexpr,  # such a row's keys are shared among num_splits programs
    UPCAST: tl.constexpr,  # multiply in float32
):
    tile = tl.program_id(0)
    kv_head = tl.program_id(1)
    TILE_QUERIES: tl.constexpr = 1 if IS_SINGLE else TILE_ROWS // GROUP
    row = tile
    if not IS_SINGLE:
        row = _row_of(tile, query_start_locs, num_rows, TILE_QUERIES)
    query_start = tl.load(query_start_locs + row).to(tl.int32)
    query_len = tl.load(query_start_locs + row + 1).to(tl.int32) - query_start
    first_query = 0
    if not IS_SINGLE:
        first_query = (tile - query_start // TILE_QUERIES - row) * TILE_QUERIES
    is_other_kind = query_len != 1 if IS_SINGLE else query_len == 1
    if is_other_kind | (first_query >= query_len):
        return

    packed = tl.arange(0, TILE_ROWS)
    index = first_query + packed // GROUP
    head = kv_head * GROUP + packed % GROUP
    is_query = (packed < TILE_QUERIES * GROUP) & (index < query_len)
    dims = tl.arange(0, PADDED_HEAD)
    is_dim = dims < HEAD_SIZE
    token = (query_start + index).to(tl.int64)
    queries = tl.load(
        query + token[:, None] * query_stride + head[:, None] * query_head_stride + dims[None, :],
        mask=is_query[:, None] & is_dim[None, :],
        other=0.0,
    )
    if UPCAST:
        queries = queries.to(tl.float32)

    # Keys [key_begin, key_end) are seen by some query of the tile; a padding row has none.
    num_before = tl.load(context_lens + row).to(tl.int32) - query_len
    position = num_before + index
    key_end = num_before + tl.minimum(first_query + TILE_QUERIES, query_len)
    key_begin = 0
    if WINDOW > 0:
        key_begin = tl.maximum(num_before + first_query - WINDOW + 1, 0)
    first = key_begin // TILE_KEYS
    last = tl.cdiv(key_end, TILE_KEYS)
    split = 0
    if IS_SPLIT:
        split = tl.program_id(2)
        part = tl.cdiv(last - first, num_splits)
        first += split * part
        last = tl.minimum(first + part, last)

    highest = tl.full([TILE_ROWS], float("-inf"), tl.float32)
    total = tl.zeros([TILE_ROWS], tl.float32)
    sums = tl.zeros([TILE_ROWS, PADDED_HEAD], tl.float32)
    for key_tile in range(first, last):
        place = key_tile * TILE_KEYS + tl.arange(0, TILE_KEYS)
        is_key = (place >= key_begin) & (place < key_end)
        block = tl.load(block_tables + row.to(tl.int64) * table_width + place // BLOCK_SIZE, mask=is_key, other=0)
        base = block.to(tl.int64) * block_stride + (place % BLOCK_SIZE) * slot_stride + kv_head * head_stride
        key = tl.load(keys + base[None, :] + dims[:, None], mask=is_key[None, :] & is_dim[:, None], other=0.0)
        value = tl.load(values + base[:, None] + dims[None, :], mask=is_key[:, None] & is_dim[None, :], other=0.0)
        if UPCAST:
            key = key.to(tl.float32)
            value = value.to(tl.float32)
        scores = tl.dot(queries, key, input_precision="ieee") * scale
        if SOFTCAP > 0.0:
            # tanh by the sigmoid, which Triton has on every device
            scores = SOFTCAP * (2.0 * tl.sigmoid(scores * (2.0 / SOFTCAP)) - 1.0)
        is_seen = is_key[None, :] & (place[None, :] <= position[:, None])
        if WINDOW > 0:
            is_seen = is_seen & (place[None, :] > position[:, None] - WINDOW)
        scores = tl.where(is_seen, scores * _LOG2_E, float("-inf"))
        now_highest = tl.maximum(highest, tl.max(scores, 1))
        # A query that has seen no key so far: minus infinity less itself would be NaN.
        shift = tl.where(now_highest == float("-inf"), 0.0, now_highest)
        weights = tl.exp2(scores - shift[:, None])
        fade = tl.exp2(highest - shift)
        total = total * fade + tl.sum(weights, 1)
        sums = sums * fade[:, None] + tl.dot(weights.to(value.dtype), value, input_precision="ieee")
        highest = now_highest

    denominator = tl.where(total == 0.0, 1.0, total)
    answer = sums / denominator[:, None]
    if IS_SPLIT:
        part_index = (row * tl.num_programs(1) * GROUP + head) * num_splits + split
        tl.store(part_sums + part_index[:, None] * PADDED_HEAD + dims[None, :], answer, mask=is_query[:, None])
        tl.store(part_logs + part_index, highest + tl.log2(denominator), mask=is_query)
    else:
        tl.store(
            output + token[:, None] * output_stride + head[:, None] * HEAD_SIZE + dims[None, :],
            answer.to(output.dtype.element_ty),
            mask=is_query[:, None] & is_dim[None, :],
        )


@triton.jit(do_not_specialize=_SIZES)
def combine(
    output,
    part_sums,
    part_logs,
    query_start_locs,
    num_splits,
    output_stride,
    HEAD_SIZE: tl.constexpr,
    PADDED_HEAD: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
):
    """The parts of one row of one query, for one head: grid (R, heads). Rows of more queries are left as they are."""
    row = tl.program_id(0)
    head = tl.program_id(1)
    query_start = tl.load(query_start_locs + row)
    if tl.load(query_start_locs + row + 1) - query_start != 1:
        return
    split = tl.arange(0, MAX_SPLITS)
    dims = tl.arange(0, PADDED_HEAD)
    is_split = split < num_splits
    first_part = (row * tl.num_programs(1) + head) * num_splits
    logs = tl.load(part_logs + first_part + split, mask=is_split, other=float("-inf"))
    sums = tl.load(
        part_sums + (first_part + split[:, None]) * PADDED_HEAD + dims[None, :], mask=is_split[:, None], other=0.0
    )
    highest = tl.max(logs, 0)
    weights = tl.exp2(logs - tl.where(highest == float("-inf"), 0.0, highest))
    total = tl.sum(weights, 0)
    answer = tl.sum(sums * weights[:, None], 0) / tl.where(total == 0.0, 1.0, total)
    tl.store(
        output + query_start * output_stride + head * HEAD_SIZE + dims,
        answer.to(output.dtype.element_ty),
        mask=dims < HEAD_SIZE,
    )


@triton.jit
def store(
    keys,
    values,
    key,  # [T, kv_heads, HEAD_SIZE]
    value,
    slot_mapping,  # [T]; -1: written nowhere
    block_stride,
    slot_stride,
    head_stride,
    key_stride,
    key_head_stride,
    value_stride,
    value_head_stride,
    NUM_HEADS: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    WIDTH: tl.constexpr,  # NUM_HEADS * HEAD_SIZE or more, a power of two
):
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_mapping + token).to(tl.int64)
    if slot < 0:
        return
    number = tl.arange(0, WIDTH)
    head = number // HEAD_SIZE
    dim = number % HEAD_SIZE
    is_stored = head < NUM_HEADS
    place = slot // BLOCK_SIZE * block_stride + slot % BLOCK_SIZE * slot_stride + head * head_stride + dim
    new_key = tl.load(key + token * key_stride + head * key_head_stride + dim, mask=is_stored)
    new_value = tl.load(value + token * value_stride + head * value_head_stride + dim, mask=is_stored)
    tl.store(keys + place, new_key.to(keys.dtype.element_ty), mask=is_stored)
    tl.store(values + place, new_value.to(values.dtype.element_ty), mask=is_stored)
