"""Paged attention by PyTorch's own FlashAttention 2 (`torch.nn.attention.varlen`): CUDA, half precision, pages of 256.

What runs where the package `flash-attn` is not installed: the same kernels without logit softcapping. Knows blocks and
rows, not requests.
"""

import inspect
from typing import Any

import torch

from kv_cache.tensor_pool import TensorPool
from worker.attention.backend import AttentionBatch, AttentionFeatures, refuse_unimplemented
from worker.attention.flash_rows import PAGE_TOKENS, FlashRows, store_for, window_of

#: PyTorch before 2.13 lacks some of them.
_NEEDED_ARGUMENTS = ("scale", "window_size", "enable_gqa", "seqused_k", "block_table", "num_splits")


class TorchVarlenBackend:
    """One function for rows of any length. It must not split keys among processors: with block tables it then leaves
    rows unwritten (pytorch/pytorch#194167). So few rows with long contexts do not fill a GPU here."""

    name = "torch_varlen"
    features = AttentionFeatures(
        sliding_window=True,
        softcap=False,
        sinks=False,
        block_size_multiple=PAGE_TOKENS,
        dtypes=(torch.float16, torch.bfloat16),
        device_types=("cuda",),
        head_size_multiple=8,
        max_head_size=256,
        min_capability=(8, 0),
        cuda_graphs=True,
    )

    def __init__(self, tensor_pool: TensorPool) -> None:
        self._attend_rows = _function()
        self._pool = tensor_pool
        self._store = store_for(tensor_pool.device)
        self._batch: AttentionBatch | None = None
        self._rows: FlashRows | None = None

    @classmethod
    def missing(cls, device: str) -> str | None:
        try:
            taken = inspect.signature(_function()).parameters
        except ImportError as error:
            return f"PyTorch {torch.__version__} has no attention of rows of any length ({error})"
        if lacking := [argument for argument in _NEEDED_ARGUMENTS if argument not in taken]:
            return f"varlen_attn of PyTorch {torch.__version__} does not take {', '.join(lacking)}"
        return None

    def begin(self, batch: AttentionBatch) -> None:
        self._batch = batch
        self._rows = FlashRows(batch, self._pool.block_size)

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
        batch, rows = self._batch, self._rows
        assert batch is not None, "begin() comes before forward()"
        assert rows is not None
        keys, values = self._pool.key_value(layer)
        self._store(keys, values, key, value, batch.slot_mapping)
        attended = self._attend_rows(
            query.to(keys.dtype),
            keys,
            values,
            rows.query_start_locs,
            rows.key_start_locs,
            rows.max_query_len,
            rows.max_keys,
            scale=scale,
            window_size=window_of(sliding_window),
            enable_gqa=True,
            seqused_k=rows.context_lens,
            block_table=rows.block_tables,
            num_splits=1,
        )
        return attended.to(query.dtype)


def _function() -> Any:
    from torch.nn.attention.varlen import varlen_attn

    return varlen_attn
