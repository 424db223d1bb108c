"""Python's garbage collector in processes that handle many small requests and hold little in circles."""

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
