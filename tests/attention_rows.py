"""Rows of a batch over a paged cache, for any attention backend, and what attention of them should be."""

import torch

from kv_cache.tensor_pool import TensorPool
from worker.attention import AttentionBackend, AttentionBatch

#: (context, query) lengths: decodes short and long, a whole prompt, chunks with a prefix, one ending on a block's edge
MIXED = [(1, 1), (70, 1), (16, 1), (33, 33), (40, 7), (9, 1), (64, 32), (17, 1), (2, 2)]


def plain_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, window: int | None, softcap: float | None = None
) -> torch.Tensor:
    """One row written out: query [Q, H, D] are the last tokens of key, value [S, KVH, D]. In float64."""
    num_queries, num_keys = query.shape[0], key.shape[0]
    keys, values = (part.double().repeat_interleave(query.shape[1] // key.shape[1], dim=1) for part in (key, value))
    scores = torch.einsum("qhd,khd->hqk", query.double(), keys) * query.shape[2] ** -0.5
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    positions = torch.arange(num_keys - num_queries, num_keys)[:, None]
    is_seen = torch.arange(num_keys) <= positions
    if window is not None:
        is_seen &= torch.arange(num_keys) > positions - window
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(~is_seen, -torch.inf).softmax(-1), values)


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
        seed: int = 7,
    ) -> None:
        num_heads, num_kv_heads = heads
        self.scale = head_size**-0.5
        generator = torch.Generator().manual_seed(seed)
        num_columns = [-(-context // block_size) for context, _ in lengths]
        self.pool = TensorPool(1, sum(num_columns) + 1, 0, block_size, num_kv_heads, head_size, dtype, "cpu")
        for cache in self.pool.key_value(0):
            cache[1:] = garbage
        ids = (torch.randperm(sum(num_columns), generator=generator) + 1).tolist()
        self._tables = [[ids.pop() for _ in range(columns)] for columns in num_columns]
        self.rows = [
            tuple(
                torch.randn(length, number, head_size, generator=generator).to(dtype)
                for length, number in ((query_len, num_heads), (context, num_kv_heads), (context, num_kv_heads))
            )
            for context, query_len in lengths
        ]
        self.batch = self._batch([(context - query_len, context) for context, query_len in lengths])

    def backend(self, backend_type: type[AttentionBackend]) -> AttentionBackend:
        """One that has written the earlier tokens to the pool, each its own way, and is about to run the batch."""
        backend = backend_type(self.pool)
        earlier = [(0, len(key) - len(query)) for query, key, _ in self.rows]
        if any(end for _, end in earlier):
            backend.begin(self._batch(earlier))
            keys, values = (
                torch.cat([row[part][:end] for row, (_, end) in zip(self.rows, earlier, strict=True)])
                for part in (1, 2)
            )
            num_heads = self.rows[0][0].shape[1]
            backend.forward(0, keys.repeat_interleave(num_heads // keys.shape[1], dim=1), keys, values, scale=1.0)
        backend.begin(self.batch)
        return backend

    def filled(self, backend_type: type[AttentionBackend]) -> AttentionBackend:
        """As `backend`, for those that keep keys and values as the pool's shape says: the earlier ones lie there."""
        for table, (query, *cached) in zip(self._tables, self.rows, strict=True):
            num_earlier = len(cached[0]) - len(query)
            slots = [
                table[position // self.pool.block_size] * self.pool.block_size + position % self.pool.block_size
                for position in range(num_earlier)
            ]
            for cache, new in zip(self.pool.key_value(0), cached, strict=True):
                cache.flatten(0, 1)[slots] = new[:num_earlier]
        backend = backend_type(self.pool)
        backend.begin(self.batch)
        return backend

    def forward(self, backend: AttentionBackend, window: int | None, softcap: float | None = None) -> torch.Tensor:
        return backend.forward(
            0,
            torch.cat([query for query, _, _ in self.rows]),
            torch.cat([key[-len(query) :] for query, key, _ in self.rows]),
            torch.cat([value[-len(query) :] for query, _, value in self.rows]),
            scale=self.scale,
            sliding_window=window,
            softcap=softcap,
        )

    def attend(self, backend_type: type[AttentionBackend], window: int | None) -> tuple[torch.Tensor, torch.Tensor]:
        """(what the backend computes, what it should)."""
        return self.forward(self.backend(backend_type), window), self.wanted(window)

    def wanted(self, window: int | None, softcap: float | None = None) -> torch.Tensor:
        return torch.cat([plain_attention(query, key, value, window, softcap) for query, key, value in self.rows])

    def _batch(self, spans: list[tuple[int, int]]) -> AttentionBatch:
        """Positions [start, end) of each row; rows without any are left out."""
        block_size = self.pool.block_size
        some = [(table, *span) for table, span in zip(self._tables, spans, strict=True) if span[1] > span[0]]
        places = [(table[position // block_size], position) for table, *span in some for position in range(*span)]
        query_lens = [end - start for _, start, end in some]
        contexts = [end for _, _, end in some]
        widest = max(len(table) for table, _, _ in some)
        return AttentionBatch(
            slot_mapping=torch.tensor([block * block_size + position % block_size for block, position in places]),
            block_tables=torch.tensor([table + [0] * (widest - len(table)) for table, _, _ in some]),
            query_start_locs=torch.tensor([0, *query_lens]).cumsum(0),
            context_lens=torch.tensor(contexts),
            positions=torch.tensor([position for _, position in places]),
            query_lens=query_lens,
            row_context_lens=contexts,
            started_blocks=torch.tensor(
                [block for block, position in places if position % block_size == 0], dtype=torch.long
            ),
        )
