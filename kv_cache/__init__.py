"""Paged KV cache: block ids, tables and the prefix index.

The tensors are in `kv_cache.tensor_pool`, which alone imports torch.
"""

from kv_cache.block_manager import NULL_BLOCK, BlockManager, BlockPairs
from kv_cache.block_pool import BlockKey
from kv_cache.table_request import AllocStatus, PrefixCounts, TableRequest

__all__ = ["NULL_BLOCK", "AllocStatus", "BlockKey", "BlockManager", "BlockPairs", "PrefixCounts", "TableRequest"]
