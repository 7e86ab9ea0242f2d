"""Random mixed batches over a paged cache on any device, and what attention of them should be.

The batches are made as the runner makes them; blocks nobody has written hold NaN. Knows no backend.
"""

import random
from collections.abc import Callable

import torch

from kv_cache.tensor_pool import TensorPool
from scheduler.outputs import ScheduledChunk
from tests.gpu.timing import wait_for
from worker.attention import AttentionBackend, AttentionBatch
from worker.flat_batch import FlatBatch


class RandomBatch:
    """Sequences of random lengths of up to `max_context` tokens: some decode, some have a chunk of several tokens
    with or without something before it. `heads`: of queries, of keys."""

    def __init__(
        self,
        seed: int,
        *,
        num_rows: int,
        max_context: int,
        block_size: int,
        heads: tuple[int, int],
        head_size: int,
        dtype: torch.dtype,
        device: str,
        only_decodes: bool,
    ) -> None:
        self._block_size = block_size
        self.scale = head_size**-0.5
        numbers = random.Random(seed)
        generator = torch.Generator(device).manual_seed(seed)
        contexts = [numbers.randint(1, max_context) for _ in range(num_rows)]
        lengths = [1 if only_decodes else numbers.choice((1, numbers.randint(1, context))) for context in contexts]
        columns = [-(-context // block_size) for context in contexts]
        num_blocks = sum(columns) + 1
        self.pool = TensorPool(1, num_blocks, 0, block_size, heads[1], head_size, dtype, device)
        for cache in self.pool.key_value(0):
            cache[1:] = torch.nan
        ids = list(range(1, num_blocks))
        numbers.shuffle(ids)
        self._tables = [[ids.pop() for _ in range(count)] for count in columns]
        self._spans = [(context - length, context) for context, length in zip(contexts, lengths, strict=True)]
        self._flat = FlatBatch(sum(contexts), num_rows, max(columns), block_size, torch.device(device))

        def normal(length: int, num_heads: int) -> torch.Tensor:
            return torch.randn(length, num_heads, head_size, generator=generator, device=device).to(dtype)

        self._queries = [normal(length, heads[0]) for length in lengths]
        # Half precision rounds what is large more coarsely than the limits allow for.
        self._rows = [(normal(context, heads[1]), normal(context, heads[1]).clamp_(-2, 2)) for context in contexts]

    def run(
        self, backend_of: Callable[[TensorPool], AttentionBackend], window: int | None, softcap: float | None
    ) -> torch.Tensor:
        """[T, heads, head_size] of the batch, once the backend has written what comes before it, its own way."""
        backend = backend_of(self.pool)
        earlier = [(0, start) for start, _ in self._spans]
        if any(end for _, end in earlier):
            keys, values = self._tokens(earlier)
            queries = keys.repeat_interleave(self._queries[0].shape[1] // keys.shape[1], dim=1)
            backend.begin(self._batch(earlier))
            backend.forward(0, queries, keys, values, scale=self.scale)
            wait_for(self.pool.device.type)  # the next batch is filled into the same memory of the host
        keys, values = self._tokens(self._spans)
        backend.begin(self._batch(self._spans))
        return backend.forward(
            0, torch.cat(self._queries), keys, values, scale=self.scale, sliding_window=window, softcap=softcap
        )

    def wanted(self, window: int | None, softcap: float | None) -> torch.Tensor:
        """The same, in float64 and without a cache."""
        return torch.cat(
            [
                plain_attention(query, key, value, self.scale, window, softcap)
                for query, (key, value) in zip(self._queries, self._rows, strict=True)
            ]
        )

    def _tokens(self, spans: list[tuple[int, int]]) -> tuple[torch.Tensor, torch.Tensor]:
        keys, values = (
            torch.cat([row[part][start:end] for row, (start, end) in zip(self._rows, spans, strict=True)])
            for part in (0, 1)
        )
        return keys, values

    def _batch(self, spans: list[tuple[int, int]]) -> AttentionBatch:
        chunks = [
            ScheduledChunk(f"row {row}", row, start, [0] * (end - start), table, end - start > 1, True)
            for row, ((start, end), table) in enumerate(zip(spans, self._tables, strict=True))
            if end > start
        ]
        return self._flat.fill(chunks)[2]


def plain_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scale: float,
    window: int | None,
    softcap: float | None,
) -> torch.Tensor:
    """One row written out: query [Q, H, D] are the last tokens of key, value [S, KVH, D] → float64 [Q, H, D]."""
    num_queries, num_heads, head_size = query.shape
    num_keys, num_kv_heads = key.shape[:2]
    grouped = query.double().view(num_queries, num_kv_heads, num_heads // num_kv_heads, head_size)
    scores = torch.einsum("qkgd,skd->kgqs", grouped, key.double()) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    last_seen = torch.arange(num_keys - num_queries, num_keys, device=query.device)[:, None]
    places = torch.arange(num_keys, device=query.device)
    is_seen = places <= last_seen
    if window is not None:
        is_seen &= places > last_seen - window
    weights = scores.masked_fill(~is_seen, -torch.inf).softmax(-1)
    return torch.einsum("kgqs,skd->qkgd", weights, value.double()).reshape(num_queries, num_heads, head_size)
