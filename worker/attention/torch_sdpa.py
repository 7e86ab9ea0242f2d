"""Paged attention by PyTorch's own `scaled_dot_product_attention`: any device, block size and dtype.

This backend is the oracle of the others: plain gathers, exact masks. It knows blocks and rows, not requests.
"""

from dataclasses import dataclass

import torch
from torch.nn.functional import scaled_dot_product_attention

from kv_cache.tensor_pool import TensorPool
from worker.attention.backend import AttentionBatch, AttentionFeatures, refuse_unimplemented

#: Queries of a prefill row are taken in blocks of this many: it bounds the mask and skips keys nobody sees.
QUERY_BLOCK = 512


@dataclass(slots=True, eq=False)
class _DecodeGroup:
    """Decode rows of similar length in one padded call. tokens [D]: their places in the flat batch; blocks
    [D * columns]: the blocks they read, row by row; bias [D, 1, 1, columns * block_size]: 0 where a key is seen,
    minus infinity elsewhere."""

    tokens: torch.Tensor
    blocks: torch.Tensor
    bias: torch.Tensor


@dataclass(slots=True, eq=False)
class _PrefillBlock:
    """Queries [first, last) of the flat batch, all of one row, against keys [key_first, key_last) of that row."""

    first: int
    last: int
    key_first: int
    key_last: int
    bias: torch.Tensor


@dataclass(slots=True, eq=False)
class _PrefillRow:
    blocks: torch.Tensor
    context_len: int
    queries: list[_PrefillBlock]


class TorchSdpaBackend:
    """Decode rows run in padded groups, prefill rows one by one. Gathers and masks are made once a step per
    window size and shared by all layers."""

    name = "torch_sdpa"
    features = AttentionFeatures(sliding_window=True, softcap=False, sinks=False)

    def __init__(self, tensor_pool: TensorPool) -> None:
        self._pool = tensor_pool
        self._batch: AttentionBatch | None = None
        self._plans: dict[int | None, tuple[list[_DecodeGroup], list[_PrefillRow]]] = {}

    @classmethod
    def missing(cls, device: str) -> str | None:
        return None

    def begin(self, batch: AttentionBatch) -> None:
        self._batch = batch
        self._plans.clear()

    def forward(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        scale: float,
        sliding_window: int | None = None,
        softcap: float | None = None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        refuse_unimplemented(self, softcap, sinks)
        batch = self._batch
        assert batch is not None, "begin() comes before forward()"
        keys, values = self._pool.key_value(layer)
        _write(keys, key, batch)
        _write(values, value, batch)
        plan = self._plans.get(sliding_window)
        if plan is None:
            plan = self._plans[sliding_window] = _plan(batch, self._pool, sliding_window)
        output = torch.empty_like(query)
        for group in plan[0]:
            output[group.tokens] = _attend_decodes(group, query[group.tokens], keys, values, scale)
        for row in plan[1]:
            _attend_prefill(row, query, keys, values, scale, output)
        return output


def _write(cache: torch.Tensor, new: torch.Tensor, batch: AttentionBatch) -> None:
    # A started block may hold another sequence's leftovers. They are masked, but zero times NaN is NaN: one
    # overflowing request must not reach the next owner of its blocks.
    if batch.started_blocks.numel():
        cache.index_fill_(0, batch.started_blocks, 0)
    cache.flatten(0, 1).index_copy_(0, batch.slot_mapping, new.to(cache.dtype))


def _plan(batch: AttentionBatch, pool: TensorPool, window: int | None) -> tuple[list[_DecodeGroup], list[_PrefillRow]]:
    block_size = pool.block_size
    decodes: dict[int, list[tuple[int, int, int, int]]] = {}
    prefills: list[_PrefillRow] = []
    first = 0
    for row, (query_len, context_len) in enumerate(zip(batch.query_lens, batch.row_context_lens, strict=True)):
        if query_len == 1:
            first_seen = 0 if window is None else max(0, context_len - window)
            first_column = first_seen // block_size
            num_columns = (context_len - 1) // block_size + 1 - first_column
            # Rows whose lengths share a power of two go together, so that padding at most doubles the work.
            decodes.setdefault(num_columns.bit_length(), []).append((row, first, first_column, num_columns))
        else:
            prefills.append(_plan_prefill(batch, row, first, query_len, context_len, pool, window))
        first += query_len
    groups = [_plan_decodes(batch, members, pool, window) for members in decodes.values()]
    return groups, prefills


def _plan_decodes(
    batch: AttentionBatch, members: list[tuple[int, int, int, int]], pool: TensorPool, window: int | None
) -> _DecodeGroup:
    device, block_size = batch.block_tables.device, pool.block_size
    rows, tokens, first_columns, nums_columns = torch.tensor(members, device=device).unbind(1)
    num_columns = max(member[3] for member in members)
    columns = first_columns[:, None] + torch.arange(num_columns, device=device)
    is_used = torch.arange(num_columns, device=device) < nums_columns[:, None]
    # Columns past a row's own blocks read the null block, whatever the table says there.
    clamped = columns.clamp(max=batch.block_tables.shape[1] - 1)
    blocks = batch.block_tables[rows].gather(1, clamped).masked_fill(~is_used, 0).flatten()
    key_positions = (columns[:, :, None] * block_size + torch.arange(block_size, device=device)).flatten(1)
    context_lens = batch.context_lens[rows][:, None]
    mask = key_positions < context_lens
    if window is not None:
        mask &= key_positions >= context_lens - window
    return _DecodeGroup(tokens, blocks, _as_bias(mask, pool.dtype)[:, None, None, :])


def _plan_prefill(
    batch: AttentionBatch,
    row: int,
    first: int,
    query_len: int,
    context_len: int,
    pool: TensorPool,
    window: int | None,
) -> _PrefillRow:
    device = batch.block_tables.device
    start = context_len - query_len
    queries = []
    for offset in range(0, query_len, QUERY_BLOCK):
        end = min(offset + QUERY_BLOCK, query_len)
        key_last = start + end
        key_first = 0 if window is None else max(0, start + offset - window + 1)
        query_positions = torch.arange(start + offset, key_last, device=device)[:, None]
        key_positions = torch.arange(key_first, key_last, device=device)
        mask = key_positions <= query_positions
        if window is not None:
            mask &= key_positions > query_positions - window
        queries.append(_PrefillBlock(first + offset, first + end, key_first, key_last, _as_bias(mask, pool.dtype)))
    blocks = batch.block_tables[row, : (context_len - 1) // pool.block_size + 1]
    return _PrefillRow(blocks, context_len, queries)


def _as_bias(mask: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    # What the kernel would make of a boolean mask in every layer, made once.
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(~mask, -torch.inf)


def _attend_decodes(
    group: _DecodeGroup, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float
) -> torch.Tensor:
    num_rows, num_heads, head_size = query.shape
    num_kv_heads = keys.shape[2]
    # The query heads of one key-value head stand where a sequence of queries would: no key is repeated.
    grouped = query.view(num_rows, num_kv_heads, num_heads // num_kv_heads, head_size)
    row_keys, row_values = (
        cache.index_select(0, group.blocks).view(num_rows, -1, num_kv_heads, head_size).transpose(1, 2)
        for cache in (keys, values)
    )
    attended = scaled_dot_product_attention(
        grouped.to(keys.dtype), row_keys, row_values, attn_mask=group.bias, scale=scale
    )
    return attended.reshape(num_rows, num_heads, head_size).to(query.dtype)


def _attend_prefill(
    row: _PrefillRow,
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    scale: float,
    output: torch.Tensor,
) -> None:
    row_keys, row_values = (
        cache.index_select(0, row.blocks).flatten(0, 1).transpose(0, 1)[None] for cache in (keys, values)
    )
    for block in row.queries:
        attended = scaled_dot_product_attention(
            query[block.first : block.last].transpose(0, 1)[None].to(keys.dtype),
            row_keys[:, :, block.key_first : block.key_last],
            row_values[:, :, block.key_first : block.key_last],
            attn_mask=block.bias,
            scale=scale,
            enable_gqa=True,
        )
        output[block.first : block.last] = attended[0].transpose(0, 1)
