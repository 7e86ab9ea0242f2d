"""Rows of a batch over a paged cache, for any attention backend, and what attention of them should be."""

import torch

from kv_cache.tensor_pool import TensorPool
from worker.attention import AttentionBackend, AttentionBatch

#: (context, query) lengths: decodes short and long, a whole prompt, chunks with a prefix, one ending on a block's edge
MIXED = [(1, 1), (70, 1), (16, 1), (33, 33), (40, 7), (9, 1), (64, 32), (17, 1), (2, 2)]


def plain_attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, window: int | None) -> torch.Tensor:
    """One row written out: query [Q, H, D] are the last tokens of key, value [S, KVH, D]. In float64."""
    num_queries, num_keys = query.shape[0], key.shape[0]
    output = torch.empty_like(query, dtype=torch.float64)
    for head in range(query.shape[1]):
        kv_head = head // (query.shape[1] // key.shape[1])
        for index in range(num_queries):
            last = num_keys - num_queries + index
            first = 0 if window is None else max(0, last - window + 1)
            scores = key[first : last + 1, kv_head].double() @ query[index, head].double() * query.shape[2] ** -0.5
            output[index, head] = scores.softmax(0) @ value[first : last + 1, kv_head].double()
    return output


class Rows:
    """Sequences whose earlier tokens are already in the pool, and a batch of their last `query_len` tokens.

    `heads`: of queries, of keys.
    """

    def __init__(
        self,
        lengths: list[tuple[int, int]],
        block_size: int,
        *,
        dtype: torch.dtype = torch.float32,
        garbage: float = 0.0,
        heads: tuple[int, int] = (6, 2),
        head_size: int = 16,
    ) -> None:
        num_heads, num_kv_heads = heads
        self.scale = head_size**-0.5
        generator = torch.Generator().manual_seed(7)
        num_columns = [-(-context // block_size) for context, _ in lengths]
        self.pool = TensorPool(1, sum(num_columns) + 1, 0, block_size, num_kv_heads, head_size, dtype, "cpu")
        keys, values = self.pool.key_value(0)
        keys[1:], values[1:] = garbage, garbage
        ids = (torch.randperm(sum(num_columns), generator=generator) + 1).tolist()
        tables: list[list[int]] = []
        slots: list[int] = []
        started: list[int] = []
        self.rows = []
        for (context, query_len), columns in zip(lengths, num_columns, strict=True):
            table = [ids.pop() for _ in range(columns)]
            tables.append(table)
            query, key, value = (
                torch.randn(length, number, head_size, generator=generator).to(dtype)
                for length, number in ((query_len, num_heads), (context, num_kv_heads), (context, num_kv_heads))
            )
            self.rows.append((query, key, value))
            for position in range(context - query_len):
                if position % block_size == 0:
                    keys[table[position // block_size]], values[table[position // block_size]] = 0, 0
                keys[table[position // block_size], position % block_size] = key[position]
                values[table[position // block_size], position % block_size] = value[position]
            for position in range(context - query_len, context):
                slots.append(table[position // block_size] * block_size + position % block_size)
                if position % block_size == 0:
                    started.append(table[position // block_size])
        widest = max(num_columns)
        query_lens = [query_len for _, query_len in lengths]
        contexts = [context for context, _ in lengths]
        self.batch = AttentionBatch(
            slot_mapping=torch.tensor(slots),
            block_tables=torch.tensor([table + [0] * (widest - len(table)) for table in tables]),
            query_start_locs=torch.tensor([0, *query_lens]).cumsum(0),
            context_lens=torch.tensor(contexts),
            positions=torch.cat([torch.arange(context - query, context) for context, query in lengths]),
            query_lens=query_lens,
            row_context_lens=contexts,
            started_blocks=torch.tensor(started, dtype=torch.long),
        )

    def attend(self, backend_type: type[AttentionBackend], window: int | None) -> tuple[torch.Tensor, torch.Tensor]:
        """(what the backend computes, what it should)."""
        backend = backend_type(self.pool)
        backend.begin(self.batch)
        got = backend.forward(
            0,
            torch.cat([query for query, _, _ in self.rows]),
            torch.cat([key[-len(query) :] for query, key, _ in self.rows]),
            torch.cat([value[-len(query) :] for query, _, value in self.rows]),
            scale=self.scale,
            sliding_window=window,
        )
        want = torch.cat([plain_attention(query, key, value, window) for query, key, value in self.rows])
        return got, want
