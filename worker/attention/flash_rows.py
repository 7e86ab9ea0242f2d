"""A batch in the form that FlashAttention's paged functions take, whoever offers them."""

from collections.abc import Callable

import torch

from worker.attention.backend import AttentionBatch
from worker.attention.slots import store_in_slots

#: FlashAttention 2 reads pages of this many tokens, or of a multiple.
PAGE_TOKENS = 256

Store = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], None]


class FlashRows:
    """Made once a step, on the device. block_tables [R, max blocks], context_lens [R], query_start_locs and
    key_start_locs [R + 1] are int32; `max_keys` is what the tables have room for, so that it depends on sizes alone."""

    def __init__(self, batch: AttentionBatch, block_size: int) -> None:
        self.block_tables = batch.block_tables.to(torch.int32)
        self.context_lens = batch.context_lens.to(torch.int32)
        self.query_start_locs = batch.query_start_locs.to(torch.int32)
        self.key_start_locs = torch.nn.functional.pad(self.context_lens.cumsum(0), (1, 0)).to(torch.int32)
        self.max_query_len = max(batch.query_lens)
        self.max_keys = batch.block_tables.shape[1] * block_size


def window_of(sliding_window: int | None) -> tuple[int, int]:
    """(keys seen to the left of a token's own, to its right); -1: all. A window counts the token's own key."""
    return (-1, 0) if sliding_window is None else (sliding_window - 1, 0)


def store_for(device: torch.device) -> Store:
    """What writes new keys and values: our kernel where Triton is there, as it is with every CUDA build of PyTorch for
    Linux, else PyTorch's operations."""
    if device.type == "cuda":
        try:
            import triton  # noqa: F401
        except ImportError:
            return store_in_slots
        from worker.attention.triton_paged import store_in_slots as store_by_triton

        return store_by_triton
    return store_in_slots
