"""The disk of a gateway's machine: real files in memory, which outlive the simulated processes that write them."""

import os
import shutil
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from protocol.nats.outbox import Record, Spool

_IN_MEMORY = Path("/dev/shm")


class Disk:
    def __init__(self) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="spillway-", dir=_IN_MEMORY if _IN_MEMORY.is_dir() else None))
        self._spools: list[Spool] = []

    def spool(self, name: str) -> Spool:
        spool = _SimulatedSpool(self._folder / name)
        self._spools.append(spool)
        return spool

    def let_go(self) -> None:
        """Close the files of a dead process, which releases their locks."""
        for spool in self._spools:
            spool.close()
        self._spools.clear()

    def throw_away(self) -> None:
        self.let_go()
        shutil.rmtree(self._folder)


class _SimulatedSpool(Spool):
    """The real spool, with the simulated time on its files, by which they are sorted."""

    def append(self, records: Sequence[Record]) -> None:
        super().append(records)
        os.utime(self._segments[-1].path, ns=(time.time_ns(), time.time_ns()))
