"""Asks Linux to keep memory that is read in one go in pages of 2 MiB. Knows addresses, not what lies there.

With pages of 4 KiB each step that reads hundreds of megabytes waits tens of thousands of times for the place of a page.
"""

import ctypes
import mmap

HUGE_PAGE_BYTES = 2**21


def advise_huge_pages(address: int, num_bytes: int) -> bool:
    """Whether the whole huge pages within this memory are backed as such from when they are first touched.

    False where there are none, or the system has no such pages or keeps them to itself: the memory is then what it was.
    """
    first = -(-address // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES
    last = (address + num_bytes) // HUGE_PAGE_BYTES * HUGE_PAGE_BYTES
    advice = getattr(mmap, "MADV_HUGEPAGE", None)
    if advice is None or first >= last:
        return False
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    result: int = madvise(first, last - first, advice)
    return result == 0
