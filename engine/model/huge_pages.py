"""Weights in pages of 2 MiB: a decode step reads all of them, and looking up pages of 4 KiB slows that by a fifth.

Linux usually provides them only on request (`transparent_hugepage/enabled`: madvise). The allocators of torch and
oneDNN do not request them, and their memory cannot be moved to another address, so the pages are requested afterwards.
"""

import ctypes
import logging
import mmap
import sys
from collections.abc import Iterable, Iterator
from typing import Final

log = logging.getLogger(__name__)

PAGE_BYTES: Final = 2 << 20  # of a huge page, on x86-64 and with 4 KiB pages on arm64
_MADV_COLLAPSE: Final = 25  # Linux 6.1 and later: copies the current contents; not in Python's mmap

Range = tuple[int, int]  # addresses: the first byte, and one past the last


def use_huge_pages(ranges: Iterable[Range]) -> None:
    """Move the memory at these addresses, widened to whole huge pages, to huge pages.

    Does nothing if the system has none free. Kernels before 6.1 move the memory gradually, later.
    """
    if not sys.platform.startswith("linux"):
        return
    libc = ctypes.CDLL(None, use_errno=True)
    for first, end in _whole_pages(ranges):
        for advice in (mmap.MADV_HUGEPAGE, _MADV_COLLAPSE):
            # A hole among the addresses is an error, but the rest is still moved.
            libc.madvise(ctypes.c_void_p(first), ctypes.c_size_t(end - first), advice)


def _whole_pages(ranges: Iterable[Range]) -> Iterator[Range]:
    """Widen the ranges to whole pages, and join those that then overlap or touch."""
    widened = sorted((first // PAGE_BYTES * PAGE_BYTES, -(-end // PAGE_BYTES) * PAGE_BYTES) for first, end in ranges)
    current: Range | None = None
    for first, end in widened:
        if current is not None and first <= current[1]:
            current = (current[0], max(current[1], end))
        else:
            if current is not None:
                yield current
            current = (first, end)
    if current is not None:
        yield current
