"""Paged attention by our own AVX-512 kernels: any block size, float32 and bfloat16, head sizes up to 256.

Knows blocks and rows, not requests. The fused decoder runs the same kernel inside its own step and takes from here only
the batch and the pool.
"""

import torch

from kv_cache.tensor_pool import TensorPool
from worker.attention.backend import AttentionBatch, AttentionFeatures, refuse_unimplemented
from worker.native.build import NativeUnavailableError, ensure_kernels
from worker.native.kernels import LANES, MAX_HEAD_SIZE, Kernels
from worker.native.structures import Attention, Cache


class CpuNativeBackend:
    """Never reads past a row's own tokens, so that what another request left in a block cannot show."""

    name = "cpu_native"
    features = AttentionFeatures(
        sliding_window=True,
        softcap=False,
        sinks=False,
        dtypes=(torch.float32, torch.bfloat16),
        device_types=("cpu",),
        head_size_multiple=LANES,
        max_head_size=MAX_HEAD_SIZE,
    )

    def __init__(self, tensor_pool: TensorPool) -> None:
        self.pool = tensor_pool
        self.batch: AttentionBatch | None = None
        self.kernels = Kernels(ensure_kernels())
        self._scratch = torch.empty(0)

    @classmethod
    def missing(cls, device: str) -> str | None:
        try:
            ensure_kernels()
        except NativeUnavailableError as error:
            return str(error)
        return None

    def begin(self, batch: AttentionBatch) -> None:
        self.batch = batch

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
        batch, pool = self.batch, self.pool
        assert batch is not None, "begin() comes before forward()"
        self.store(layer, key, value, batch.slot_mapping)
        _, heads, head_size = query.shape
        rows = query.to(pool.dtype).contiguous()
        output = torch.empty_like(rows)
        arguments = Attention(
            self._cache_of(layer),
            rows.data_ptr(),
            output.data_ptr(),
            batch.block_tables.data_ptr(),
            batch.query_start_locs.data_ptr(),
            batch.context_lens.data_ptr(),
            len(batch.query_lens),
            batch.block_tables.shape[1],
            heads,
            sliding_window or 0,
            scale,
        )
        num_threads = torch.get_num_threads()
        self.kernels.attention(pool.dtype, arguments, self._scratch_for(heads, head_size, num_threads), num_threads)
        return output.to(query.dtype)

    def store(self, layer: int, key: torch.Tensor, value: torch.Tensor, slot_mapping: torch.Tensor) -> None:
        """Write key and value [T, kv_heads, head_size] to slots [T] as the kernels lay them out (`cache.h`)."""
        dtype = self.pool.dtype
        self.kernels.store(
            self._cache_of(layer), key.to(dtype).contiguous(), value.to(dtype).contiguous(), slot_mapping
        )

    def _cache_of(self, layer: int) -> Cache:
        pool = self.pool
        keys, values = pool.key_value(layer)
        return Cache(keys.data_ptr(), values.data_ptr(), pool.block_size, pool.num_kv_heads, pool.head_size)

    def _scratch_for(self, heads: int, head_size: int, num_threads: int) -> torch.Tensor:
        size = self.kernels.scratch_floats(heads, self.pool.num_kv_heads, head_size) * num_threads
        if self._scratch.numel() < size:
            self._scratch = torch.empty(size)
        return self._scratch
