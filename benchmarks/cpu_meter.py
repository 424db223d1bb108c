"""CPU time of named process trees over a window, and the CPU that other processes used meanwhile."""

import asyncio
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Final

import psutil

OWN: Final = "load client"  # this process
SETTLE_CHECK_S: Final = 0.4
SETTLED_CORES: Final = 0.1  # of all trees together; heartbeats alone need less
SETTLE_LIMIT_S: Final = 30.0


@dataclass(slots=True)
class Window:
    """The CPU and wall time between the window's start and its end."""

    cpu_s: dict[str, float] = field(default_factory=dict)  # by name of the tree: user + system
    wall_s: float = 0.0
    others_cores: float = 0.0  # cores kept busy by unmeasured processes
    stolen_cores: float = (
        0.0  # cores that the hypervisor gave to other machines; this increases all CPU times, up to twofold
    )


class CpuMeter:
    """Reads user + system time, to 10 ms, of process trees. Always includes the calling process."""

    def __init__(self, pids: Mapping[str, int]) -> None:
        self._roots = {name: psutil.Process(pid) for name, pid in pids.items()}

    @contextmanager
    def window(self) -> Iterator[Window]:
        """Measure the body of the ``with`` statement; the window is filled when it closes."""
        window = Window()
        before, machine_before = self._read(), psutil.cpu_times()
        yield window
        after, machine_after = self._read(), psutil.cpu_times()
        window.cpu_s = {name: after[name] - before[name] for name in after}
        passed = {
            name: getattr(machine_after, name) - getattr(machine_before, name) for name in ("idle", "iowait", "steal")
        }
        total_s = sum(machine_after) - sum(machine_before)
        window.wall_s = total_s / (os.cpu_count() or 1)
        busy_s = total_s - sum(passed.values())
        window.others_cores = max(0.0, busy_s - sum(window.cpu_s.values())) / max(window.wall_s, 1e-9)
        window.stolen_cores = passed["steal"] / max(window.wall_s, 1e-9)

    async def settle(self) -> None:
        """Wait until the work after a load (mainly usage records) is done. Raises TimeoutError."""
        deadline_s = time.monotonic() + SETTLE_LIMIT_S
        before_s = sum(self._read().values())
        while time.monotonic() < deadline_s:
            await asyncio.sleep(SETTLE_CHECK_S)
            now_s = sum(self._read().values())
            if now_s - before_s < SETTLED_CORES * SETTLE_CHECK_S:
                return
            before_s = now_s
        raise TimeoutError(f"still busy {SETTLE_LIMIT_S:g} s after the load ended")

    def _read(self) -> dict[str, float]:
        used = {name: _tree_s(root) for name, root in self._roots.items()}
        own = psutil.Process().cpu_times()
        return {**used, OWN: own.user + own.system}


def _tree_s(root: psutil.Process) -> float:
    times = [process.cpu_times() for process in (root, *root.children(recursive=True))]
    return sum(time.user + time.system for time in times)
