"""Weights in huge pages: the addresses are whole pages, and their contents stay the same."""

import mmap
import platform
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from engine.model.huge_pages import PAGE_BYTES, _whole_pages, use_huge_pages

MIB = 1 << 20
ATTEMPTS = 100  # the kernel refuses while memory is in pieces, and then begins to move it together


def test_ranges_are_widened_to_whole_pages_and_joined() -> None:
    ranges = [(9 * MIB, 10 * MIB), (MIB, 3 * MIB), (3 * MIB + 5, 4 * MIB), (2 * MIB, 2 * MIB + 1)]
    assert list(_whole_pages(ranges)) == [(0, 4 * MIB), (8 * MIB, 10 * MIB)]
    assert list(_whole_pages([])) == []


def test_memory_and_its_neighbors_keep_their_contents() -> None:
    tensors = [torch.randn(1_000_003) for _ in range(5)]
    copies = [tensor.clone() for tensor in tensors]
    use_huge_pages((tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes) for tensor in tensors)
    assert all(torch.equal(tensor, copy) for tensor, copy in zip(tensors, copies, strict=True))


def test_addresses_without_memory_are_passed_over() -> None:
    use_huge_pages([(PAGE_BYTES, 2 * PAGE_BYTES)])


def _huge_bytes() -> int:
    rollup = Path("/proc/self/smaps_rollup").read_text()
    return 1024 * int(next(line.split()[1] for line in rollup.splitlines() if line.startswith("AnonHugePages")))


@pytest.mark.skipif(
    not Path("/proc/self/smaps_rollup").exists() or tuple(map(int, platform.release().split(".")[:2])) < (6, 1),
    reason="the kernel cannot tell, or moves memory only later",
)
def test_the_pages_become_huge() -> None:
    memory = mmap.mmap(-1, 8 * PAGE_BYTES, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    whole = np.frombuffer(memory, dtype=np.uint8)
    whole[:] = 7
    before = _huge_bytes()
    for _ in range(ATTEMPTS):
        use_huge_pages([(whole.ctypes.data, whole.ctypes.data + len(memory))])
        if _huge_bytes() - before >= 7 * PAGE_BYTES:  # the mapping need not begin at a page
            break
        time.sleep(0.1)
    else:
        pytest.fail(f"{_huge_bytes() - before} bytes are in huge pages")
    assert (whole == 7).all()
