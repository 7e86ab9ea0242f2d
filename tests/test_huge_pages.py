import mmap
from pathlib import Path

import pytest
import torch

from kv_cache.huge_pages import HUGE_PAGE_BYTES, advise_huge_pages
from kv_cache.tensor_pool import TensorPool
from worker.fused.weight_memory import ALIGNMENT_BYTES, PART_BYTES, WeightMemory

SETTING = Path("/sys/kernel/mm/transparent_hugepage/enabled")
needs_huge_pages = pytest.mark.skipif(
    not SETTING.is_file() or "[never]" in SETTING.read_text(), reason="this system gives no huge pages to who asks"
)


def huge_bytes() -> int:
    """Of this process, in huge pages."""
    (line,) = (line for line in Path("/proc/self/smaps_rollup").read_text().splitlines() if "AnonHugePages" in line)
    return int(line.split()[1]) * 1024


def test_memory_without_a_whole_huge_page_is_left_as_it_is() -> None:
    with mmap.mmap(-1, 2 * HUGE_PAGE_BYTES) as memory:
        address = torch.frombuffer(memory, dtype=torch.uint8).data_ptr()
        inside = -address % HUGE_PAGE_BYTES
        assert not advise_huge_pages(address + inside, HUGE_PAGE_BYTES - 1)
        assert not advise_huge_pages(address + inside + 1, HUGE_PAGE_BYTES)
        assert not advise_huge_pages(address, 0)


@needs_huge_pages
def test_a_pool_and_weights_lie_in_huge_pages() -> None:
    before = huge_bytes()
    pool = TensorPool(1, 9, 0, 1024, 8, 64, torch.float32, "cpu")
    in_pool = huge_bytes()
    assert in_pool > before
    assert not pool.key_value(0)[0].any()
    kept = WeightMemory().keep(torch.ones(5 * HUGE_PAGE_BYTES, dtype=torch.uint8))
    assert huge_bytes() > in_pool
    assert kept.all()


def test_kept_weights_are_contiguous_copies_that_share_nothing() -> None:
    memory = WeightMemory()
    given = [
        torch.randn(7, 5).T,
        torch.randn(3, dtype=torch.bfloat16),
        torch.randn(PART_BYTES // 4 + 1),
        torch.randn(1000, 8),
    ]
    kept = [memory.keep(tensor) for tensor in given]
    for tensor, copy in zip(given, kept, strict=True):
        assert copy.is_contiguous()
        assert copy.data_ptr() % ALIGNMENT_BYTES == 0
        assert torch.equal(copy, tensor)
    kept[1].zero_()
    assert torch.equal(kept[0], given[0])
    assert torch.equal(kept[3], given[3])
