"""The tensors behind the block ids: one tensor per layer on the device, its mirror on the host.

Owns memory and moves whole blocks. Knows neither who holds a block nor why it moves.
"""

import torch

from kv_cache.huge_pages import advise_huge_pages

BlockPairs = list[tuple[int, int]]


class TensorPool:
    """Keys and values of every block. Each layer is `[2, num_blocks, block_size, num_kv_heads, head_size]`, where
    index 0 holds keys and 1 values; device block 0 is the null block, which stays zero. How the numbers of a block lie
    within it is the attention backend's business.

    Everything starts as zeros, so what padding reads is finite and a masked weight of zero really removes it.
    """

    def __init__(
        self,
        num_layers: int,
        num_device_blocks: int,
        num_host_blocks: int,
        block_size: int,
        num_kv_heads: int,
        head_size: int,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        self.num_layers = num_layers
        self.num_device_blocks = num_device_blocks
        self.num_host_blocks = num_host_blocks
        self.block_size = block_size
        self.num_kv_heads = num_kv_heads
        self.head_size = head_size
        self.dtype = dtype
        self.device = torch.device(device)
        is_cuda = self.device.type == "cuda"
        tail = (block_size, num_kv_heads, head_size)
        self._device_layers = [
            _zeros((2, num_device_blocks, *tail), dtype, self.device) for _ in range(num_layers)
        ]
        self._host_layers = [
            torch.zeros((2, num_host_blocks, *tail), dtype=dtype, pin_memory=is_cuda and num_host_blocks > 0)
            for _ in range(num_layers)
        ]

    @staticmethod
    def block_bytes(num_layers: int, block_size: int, num_kv_heads: int, head_size: int, dtype: torch.dtype) -> int:
        """Bytes that one block takes over all layers, in each pool that holds it."""
        return num_layers * 2 * block_size * num_kv_heads * head_size * dtype.itemsize

    @property
    def num_block_bytes(self) -> int:
        return self.block_bytes(self.num_layers, self.block_size, self.num_kv_heads, self.head_size, self.dtype)

    def key_value(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Views `[num_blocks, block_size, num_kv_heads, head_size]` of a layer's device keys and values."""
        key_value = self._device_layers[layer]
        return key_value[0], key_value[1]

    def swap(self, out_pairs: BlockPairs, in_pairs: BlockPairs, copy_pairs: BlockPairs) -> None:
        """Move blocks: out (device, host), then in (host, device), then copy (device, device).

        That order lets a device block freed by a swap-out take a swapped-in block in the same call. Within one
        direction all sources are read before any destination is written.
        """
        if out_pairs:
            _move_blocks(self._device_layers, self._host_layers, out_pairs)
        if in_pairs:
            _move_blocks(self._host_layers, self._device_layers, in_pairs)
        if copy_pairs:
            _move_blocks(self._device_layers, self._device_layers, copy_pairs)


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    memory = torch.empty(shape, dtype=dtype, device=device)
    if device.type == "cpu":
        advise_huge_pages(memory.data_ptr(), memory.nbytes)
    return memory.zero_()


def _move_blocks(sources: list[torch.Tensor], destinations: list[torch.Tensor], pairs: BlockPairs) -> None:
    source_device, destination_device = sources[0].device, destinations[0].device
    source_ids = torch.tensor([source for source, _ in pairs], dtype=torch.long, device=source_device)
    destination_ids = torch.tensor(
        [destination for _, destination in pairs], dtype=torch.long, device=destination_device
    )
    for source, destination in zip(sources, destinations, strict=True):
        blocks = source.index_select(1, source_ids)
        destination.index_copy_(1, destination_ids, blocks.to(destination_device))
