"""How Python and glibc free memory, in processes that handle many small requests, and now and then a large one."""

import ctypes
import gc
from typing import Final

# Of objects made and not yet freed, from which on the youngest are looked through; CPython's own is 700, which one
# request passes several times. Circles that nobody holds then take some megabytes more before they are found.
YOUNGEST: Final = 20_000


def calm() -> None:
    """Look for garbage less often, and never again in what is there now: call it when a process is about to serve."""
    gc.collect()
    gc.freeze()  # libraries: several 100,000 objects
    _, middle, oldest = gc.get_threshold()
    gc.set_threshold(YOUNGEST, middle, oldest)


MMAP_THRESHOLD: Final = -3  # M_MMAP_THRESHOLD of mallopt(3)
LARGE_BYTES: Final = 256 * 1024


def return_large() -> None:
    """Have the allocator return what is large to the system as soon as it is freed; not for processes that compute.

    By default glibc raises the size from which on it does so to that of the largest body (mallopt(3)). Bodies of
    megabytes then leave holes in the heaps of many threads: a gateway kept 330 MiB of them, and 170 to 220 with this.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # glibc's
    if mallopt is not None:
        mallopt(MMAP_THRESHOLD, LARGE_BYTES)
