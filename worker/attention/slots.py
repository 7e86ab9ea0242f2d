"""New keys and values into their slots, by PyTorch's own operations: what backends use that have no kernel for it."""

import torch


def store_in_slots(
    keys: torch.Tensor, values: torch.Tensor, key: torch.Tensor, value: torch.Tensor, slot_mapping: torch.Tensor
) -> None:
    """key and value [T, kv_heads, head_size] to slots [T] of keys and values [blocks, block_size, kv_heads, head_size].

    A slot of -1 takes nothing. Its zeros go to the null block, which holds zeros anyway: the size of nothing here
    depends on what the device knows.
    """
    is_padding = (slot_mapping < 0)[:, None, None]
    slots = slot_mapping.clamp(min=0)
    for cache, new in ((keys, key), (values, value)):
        cache.flatten(0, 1).index_copy_(0, slots, new.to(cache.dtype).masked_fill(is_padding, 0))
