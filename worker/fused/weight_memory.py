"""Where packed weights lie: one after the other in huge pages, since a step reads all of them in that order."""

import math

import torch

from kv_cache.huge_pages import HUGE_PAGE_BYTES, advise_huge_pages

#: what is asked of the system at once; parts that nothing is written to cost nothing
PART_BYTES = 2**26
#: where a tensor may begin: a line of the CPU's caches
ALIGNMENT_BYTES = 64


class WeightMemory:
    """Keeps what it is given as long as it lives."""

    def __init__(self) -> None:
        self._part = torch.empty(0, dtype=torch.uint8)
        self._tensors: list[torch.Tensor] = []

    def keep(self, tensor: torch.Tensor) -> torch.Tensor:
        """A contiguous copy."""
        num_bytes = math.ceil(tensor.nbytes / ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        if num_bytes > len(self._part):
            self._part = _huge_pages(max(num_bytes, PART_BYTES))
        memory, self._part = self._part[:num_bytes], self._part[num_bytes:]
        kept = memory[: tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        kept.copy_(tensor)
        self._tensors.append(kept)
        return kept


def _huge_pages(num_bytes: int) -> torch.Tensor:
    memory = torch.empty(num_bytes + HUGE_PAGE_BYTES, dtype=torch.uint8)
    advise_huge_pages(memory.data_ptr(), memory.nbytes)
    return memory[-memory.data_ptr() % HUGE_PAGE_BYTES :][:num_bytes]
