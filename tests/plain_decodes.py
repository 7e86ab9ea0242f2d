"""Attention of decode rows in plain torch whose shapes depend on the number of rows alone, so that it can be captured;
other steps are those of `torch_sdpa`."""

import torch
from torch.nn.functional import scaled_dot_product_attention

from kv_cache.tensor_pool import TensorPool
from worker.attention import AttentionBatch, AttentionFeatures, TorchSdpaBackend
from worker.attention.slots import store_in_slots


class PlainDecodesBackend:
    name = "plain_decodes"
    features = AttentionFeatures(sliding_window=True, softcap=False, sinks=False, cuda_graphs=True)

    def __init__(self, pool: TensorPool) -> None:
        self._pool = pool
        self._others = TorchSdpaBackend(pool)
        self._batch: AttentionBatch | None = None

    def begin(self, batch: AttentionBatch) -> None:
        self._batch = batch
        self._others.begin(batch)

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
        batch = self._batch
        assert batch is not None
        if max(batch.query_lens) > 1:
            return self._others.forward(layer, query, key, value, scale=scale, sliding_window=sliding_window)
        caches = self._pool.key_value(layer)
        for cache in caches:
            cache.index_fill_(0, batch.started_blocks, 0)
        store_in_slots(*caches, key, value, batch.slot_mapping)
        tables = batch.block_tables
        keys, values = (
            cache.index_select(0, tables.flatten()).unflatten(0, tables.shape).flatten(1, 2).transpose(1, 2)
            for cache in caches
        )
        places = torch.arange(keys.shape[2], device=keys.device)
        seen = places < batch.context_lens[:, None]
        if sliding_window is not None:
            seen = seen & (places >= batch.context_lens[:, None] - sliding_window)
        output = scaled_dot_product_attention(
            query[:, :, None], keys, values, attn_mask=seen[:, None, None], scale=scale, enable_gqa=True
        )
        return output[:, :, 0].masked_fill(batch.context_lens[:, None, None] == 0, 0.0)
