"""Busy processes beside the tests: as many as it takes for the machine to have so much to do, whatever else it does."""

import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

PROC_STAT: Final = Path("/proc/stat")
SAMPLES: Final = 20  # of one look at the machine
SAMPLE_S: Final = 0.1
# Ends when its parent does, however that ends.
BUSY: Final = "import os\nparent = os.getppid()\nwhile os.getppid() == parent: pass"


def runnable() -> float | None:
    """How many threads of the machine want a processor, this one left out; None where no /proc tells."""
    try:
        text = PROC_STAT.read_text()
    except OSError:
        return None
    return float(next(line.split()[1] for line in text.splitlines() if line.startswith("procs_running"))) - 1


class Burner:
    """Hold the number of runnable threads near ``load``: what is missing beside all others are busy processes."""

    def __init__(self, load: int, look: Callable[[], float | None] = runnable) -> None:
        self._load = load
        self._look = look
        self._busy: list[subprocess.Popen[bytes]] = []

    def __len__(self) -> int:
        return len(self._busy)

    def adjust(self, sample_s: float = SAMPLE_S) -> None:
        """Look at the machine for a while, then start or end processes."""
        seen = []
        for _ in range(SAMPLES):
            time.sleep(sample_s)
            seen.append(self._look())
        known = [count for count in seen if count is not None]
        others = sum(known) / len(known) - len(self._busy) if known else 0.0
        wanted = min(self._load, max(0, round(self._load - others)))
        while len(self._busy) < wanted:
            self._busy.append(subprocess.Popen([sys.executable, "-I", "-S", "-c", BUSY]))
        self._end(len(self._busy) - wanted)

    def close(self) -> None:
        self._end(len(self._busy))

    def _end(self, count: int) -> None:
        for _ in range(count):
            process = self._busy.pop()
            process.kill()
            process.wait()


@contextmanager
def burning(load: int) -> Iterator[None]:
    """Keep the load at so much until the block ends; 0: leave the machine alone."""
    ended = threading.Event()
    burner = Burner(load)

    def burn() -> None:
        while not ended.is_set():
            burner.adjust()

    thread = threading.Thread(target=burn, name="burner")
    if load:
        thread.start()
    try:
        yield
    finally:
        ended.set()
        if load:
            thread.join()
        burner.close()
