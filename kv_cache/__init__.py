"""Paged KV cache: block ids and tables. The tensors are in `kv_cache.tensor_pool`, which alone imports torch."""

from kv_cache.block_manager import NULL_BLOCK, AllocStatus, BlockManager, BlockPairs

__all__ = ["NULL_BLOCK", "AllocStatus", "BlockManager", "BlockPairs"]
