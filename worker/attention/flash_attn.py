"""Paged attention by the package `flash-attn` (FlashAttention 2): CUDA, half precision, pages of 256.

Knows blocks and rows, not requests. Its kernels clear what they load past a row's last key, so that what another
request left in a block cannot show.
"""

import inspect
from typing import Any

import torch

from kv_cache.tensor_pool import TensorPool
from worker.attention.backend import AttentionBatch, AttentionFeatures, refuse_unimplemented
from worker.attention.flash_rows import PAGE_TOKENS, FlashRows, store_for, window_of

#: what its functions must take; versions before 2.6 lack some
_NEEDED_ARGUMENTS = {
    "flash_attn_varlen_func": ("block_table", "window_size", "softcap"),
    "flash_attn_with_kvcache": ("cache_seqlens", "block_table", "window_size", "softcap"),
}


class FlashAttnBackend:
    """Steps whose rows all have one query take the function for decoding, which splits long rows among processors;
    others take the one for rows of any length."""

    name = "flash_attn"
    features = AttentionFeatures(
        sliding_window=True,
        softcap=True,
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
        package = _package()
        self._attend_rows = package.flash_attn_varlen_func
        self._attend_decodes = package.flash_attn_with_kvcache
        # Some versions split the keys of such rows among processors and then leave rows unwritten; those take this.
        takes_splits = "num_splits" in inspect.signature(self._attend_rows).parameters
        self._unsplit = {"num_splits": 1} if takes_splits else {}
        self._pool = tensor_pool
        self._store = store_for(tensor_pool.device)
        self._batch: AttentionBatch | None = None
        self._rows: FlashRows | None = None

    @classmethod
    def missing(cls, device: str) -> str | None:
        try:
            package = _package()
        except ImportError as error:  # also of a build for another PyTorch
            return f"the package flash-attn is not installed ({error})"
        for function, arguments in _NEEDED_ARGUMENTS.items():
            if not hasattr(package, function):  # FlashAttention 4 installs a package of this name too
                return f"the package flash_attn that is installed has no {function}"
            taken = inspect.signature(getattr(package, function)).parameters
            if lacking := [argument for argument in arguments if argument not in taken]:
                return f"this version of flash-attn does not take {', '.join(lacking)} in {function}"
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
        shared: dict[str, Any] = {
            "softmax_scale": scale,
            "causal": True,
            "window_size": window_of(sliding_window),
            "softcap": softcap or 0.0,
            "block_table": rows.block_tables,
        }
        queries = query.to(keys.dtype)
        if rows.max_query_len == 1:
            # The new keys are in their slots, so the cache is all there is to read.
            attended = self._attend_decodes(
                queries[:, None], keys, values, cache_seqlens=rows.context_lens, **shared
            ).squeeze(1)
        else:
            attended = self._attend_rows(
                queries,
                keys,
                values,
                rows.query_start_locs,
                rows.key_start_locs,
                rows.max_query_len,
                rows.max_keys,
                **shared,
                **self._unsplit,
            )
        return attended.to(query.dtype)


def _package() -> Any:
    import flash_attn

    return flash_attn
