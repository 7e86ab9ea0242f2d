"""The tensors behind the block ids: one tensor per layer on the device, its mirror on the host.

Owns memory and moves whole blocks. Knows neither who holds a block nor why it moves.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

import torch

from kv_cache.huge_pages import advise_huge_pages
from kv_cache.staged_swap import BlockPairs, Lane, StagedSwap, Work, runs_of

#: memory on the device that blocks pass through on CUDA, in so many slots; more where a block is larger than a slot
STAGING_BYTES = 256 * 2**20
NUM_STAGING_SLOTS = 4


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
        *,
        lanes: tuple[Lane[Any], Lane[Any]] | None = None,
        max_staging_bytes: int = STAGING_BYTES,
    ) -> None:
        """`lanes` (compute, transfer): where moves are queued; by default on CUDA the stream that is current then and
        one of the pool's own, elsewhere none: `swap` returns when blocks have moved. With lanes, blocks pass through
        staging memory of `max_staging_bytes` or, where those are less, four blocks."""
        self.num_layers = num_layers
        self.num_device_blocks = num_device_blocks
        self.num_host_blocks = num_host_blocks
        self.block_size = block_size
        self.num_kv_heads = num_kv_heads
        self.head_size = head_size
        self.dtype = dtype
        self.device = torch.device(device)
        if lanes is None and self.device.type == "cuda":
            lanes = (_CudaLane(None), _CudaLane(_new_stream(self.device)))
        tail = (block_size, num_kv_heads, head_size)
        self._layers = [_zeros((2, num_device_blocks, *tail), dtype, self.device) for _ in range(num_layers)]
        self._moves: _Moves
        if lanes is None:
            self._moves = _DirectMoves(self._layers, num_host_blocks)
        else:
            num_slot_blocks = slot_blocks(self.num_block_bytes, num_host_blocks, max_staging_bytes)
            staging = _Staging(self._layers, num_host_blocks, num_slot_blocks)
            self._moves = StagedSwap(*lanes, staging, NUM_STAGING_SLOTS, num_slot_blocks)

    @staticmethod
    def block_bytes(num_layers: int, block_size: int, num_kv_heads: int, head_size: int, dtype: torch.dtype) -> int:
        """Bytes that one block takes over all layers, in each pool that holds it."""
        return num_layers * 2 * block_size * num_kv_heads * head_size * dtype.itemsize

    @property
    def num_block_bytes(self) -> int:
        return self.block_bytes(self.num_layers, self.block_size, self.num_kv_heads, self.head_size, self.dtype)

    def key_value(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Views `[num_blocks, block_size, num_kv_heads, head_size]` of a layer's device keys and values."""
        key_value = self._layers[layer]
        return key_value[0], key_value[1]

    def swap(self, out_pairs: BlockPairs, in_pairs: BlockPairs, copy_pairs: BlockPairs) -> None:
        """Move blocks: out (device, host), then in (host, device), then copy (device, device).

        That order lets a device block freed by a swap-out take a swapped-in block in the same call. Within one
        direction all sources are read before any destination is written. On CUDA the host goes on before anything has
        moved; what is launched afterwards in the stream that is current here finds the blocks as if it had.
        """
        if out_pairs:
            self._moves.swap_out(out_pairs)
        if in_pairs:
            self._moves.swap_in(in_pairs)
        if copy_pairs:
            self._moves.copy(copy_pairs)

    def time_swap_s(self, out_pairs: BlockPairs, in_pairs: BlockPairs, clock: Callable[[], float]) -> float:
        """Seconds until these moves are done; the host waits for them. A CUDA device takes the time itself."""
        if self.device.type != "cuda":
            began_s = clock()
            self.swap(out_pairs, in_pairs, [])
            return clock() - began_s
        began, ended = _new_event(is_timed=True), _new_event(is_timed=True)
        torch.cuda.synchronize(self.device)
        began.record()
        self.swap(out_pairs, in_pairs, [])
        self._moves.join()
        ended.record()
        ended.synchronize()
        return float(began.elapsed_time(ended)) / 1000


def slot_blocks(block_bytes: int, num_host_blocks: int, max_staging_bytes: int = STAGING_BYTES) -> int:
    """Blocks that one slot of staging memory holds: at least one, if any are ever swapped."""
    return min(num_host_blocks, max(1, max_staging_bytes // NUM_STAGING_SLOTS // block_bytes))


def staging_bytes(block_bytes: int, num_host_blocks: int) -> int:
    """What a pool on CUDA takes of the device's memory beside its blocks."""
    return NUM_STAGING_SLOTS * slot_blocks(block_bytes, num_host_blocks) * block_bytes


class _Moves(Protocol):
    """How blocks move; each returns when they have moved, or when it is settled after what they will."""

    def swap_out(self, pairs: BlockPairs) -> None: ...
    def swap_in(self, pairs: BlockPairs) -> None: ...
    def copy(self, pairs: BlockPairs) -> None: ...
    def join(self) -> None: ...


class _DirectMoves:
    """For a device that is the host: layer by layer, at once."""

    def __init__(self, layers: list[torch.Tensor], num_host_blocks: int) -> None:
        self._layers = layers
        # Not `new_zeros`: copies into its memory were measured to take longer.
        shape = (2, num_host_blocks, *layers[0].shape[2:])
        self._mirrors = [torch.zeros(shape, dtype=layer.dtype) for layer in layers]

    def swap_out(self, pairs: BlockPairs) -> None:
        _move_blocks(self._layers, self._mirrors, pairs)

    def swap_in(self, pairs: BlockPairs) -> None:
        _move_blocks(self._mirrors, self._layers, pairs)

    def copy(self, pairs: BlockPairs) -> None:
        _move_blocks(self._layers, self._layers, pairs)

    def join(self) -> None:
        """All is done."""


class _Staging:
    """The slots on the device, and on the host the blocks with all their layers together, so that neighbours are one
    stretch of memory that the link copies in one go. `[..., num_blocks, num_layers, 2, block_size, heads, head_size]`.
    """

    def __init__(self, layers: list[torch.Tensor], num_host_blocks: int, num_slot_blocks: int) -> None:
        first = layers[0]
        block = (len(layers), 2, *first.shape[2:])
        self._layers = layers
        self._slots = first.new_empty((NUM_STAGING_SLOTS, num_slot_blocks, *block))
        is_pinned = first.device.type == "cuda" and num_host_blocks > 0
        self._host = torch.zeros((num_host_blocks, *block), dtype=first.dtype, pin_memory=is_pinned)

    def gather(self, slot: int, device_ids: list[int]) -> Work:
        index, staged = _index(device_ids, self._slots.device), self._slots[slot, : len(device_ids)]

        def work() -> None:
            for place, layer in enumerate(self._layers):
                staged[:, place].copy_(layer.index_select(1, index).transpose(0, 1))

        return work

    def unload(self, slot: int, host_ids: list[int]) -> Work:
        def work() -> None:
            for place, first, length in runs_of(host_ids):
                self._host[first : first + length].copy_(self._slots[slot, place : place + length], non_blocking=True)

        return work

    def load(self, slot: int, host_ids: list[int]) -> Work:
        def work() -> None:
            for place, first, length in runs_of(host_ids):
                self._slots[slot, place : place + length].copy_(self._host[first : first + length], non_blocking=True)

        return work

    def scatter(self, slot: int, device_ids: list[int]) -> Work:
        index, staged = _index(device_ids, self._slots.device), self._slots[slot, : len(device_ids)]

        def work() -> None:
            for place, layer in enumerate(self._layers):
                layer.index_copy_(1, index, staged[:, place].transpose(0, 1))

        return work

    def copy(self, pairs: BlockPairs) -> Work:
        return partial(_move_blocks, self._layers, self._layers, pairs)


class _CudaLane:
    """A stream of its own, or (None) the one that is current when work is given."""

    def __init__(self, stream: torch.cuda.Stream | None) -> None:
        self._stream = stream

    def run(self, work: Work) -> None:
        with torch.cuda.stream(self._stream):  # None changes nothing
            work()

    def mark(self) -> torch.cuda.Event:
        event = _new_event()
        event.record(self._stream or torch.cuda.current_stream())
        return event

    def wait(self, mark: torch.cuda.Event) -> None:
        (self._stream or torch.cuda.current_stream()).wait_event(mark)


def _new_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def _new_event(*, is_timed: bool = False) -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=is_timed)  # type: ignore[no-untyped-call]


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    memory = torch.empty(shape, dtype=dtype, device=device)
    if device.type == "cpu":
        advise_huge_pages(memory.data_ptr(), memory.nbytes)
    return memory.zero_()


def _index(ids: list[int], device: torch.device) -> torch.Tensor:
    """Ids on the device. PyTorch gives pinned memory to nobody else before what was copied from it has arrived."""
    return torch.tensor(ids, dtype=torch.long, pin_memory=device.type == "cuda").to(device, non_blocking=True)


def _move_blocks(sources: list[torch.Tensor], destinations: list[torch.Tensor], pairs: BlockPairs) -> None:
    device = sources[0].device
    source_ids = _index([source for source, _ in pairs], device)
    destination_ids = _index([destination for _, destination in pairs], device)
    for source, destination in zip(sources, destinations, strict=True):
        destination.index_copy_(1, destination_ids, source.index_select(1, source_ids))
