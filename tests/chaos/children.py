"""Gateways and ledger writers that are forked (``tests/forks.py``): else each of them imports for two seconds."""

import asyncio
import os
import signal
from multiprocessing.context import ForkServerProcess
from pathlib import Path

from spillway.children import LAST_LINES, Child
from spillway.cli import app
from tests import forks


def command_process(arguments: list[str], log: Path) -> None:
    """The whole life of a process that runs a command of ours."""
    forks.begin(log)
    app(arguments)


class ForkedChild(Child):
    """The same as its base, but for its birth: it writes to its log by itself."""

    async def start(self) -> None:
        self._ready_path.unlink(missing_ok=True)
        self.log_path.touch()
        process = forks.context().Process(target=command_process, args=(self._arguments, self.log_path), name=self.name)
        await asyncio.to_thread(process.start)
        self._process = _Forked(process)  # type: ignore[assignment]  # all that the base uses of a process
        self._copier = asyncio.create_task(asyncio.sleep(0), name=f"log-{self.name}")

    def last_lines(self) -> str:
        return "\n  ".join(self.log_path.read_text().splitlines()[-LAST_LINES:])


class _Forked:
    """A process of multiprocessing's as one of asyncio's."""

    def __init__(self, process: ForkServerProcess) -> None:
        self._process = process
        self._ended = asyncio.Event()
        asyncio.get_running_loop().add_reader(process.sentinel, self._on_end)

    def _on_end(self) -> None:
        asyncio.get_running_loop().remove_reader(self._process.sentinel)
        self._process.join()
        self._ended.set()

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode if self._ended.is_set() else None

    async def wait(self) -> int | None:
        await self._ended.wait()
        return self.returncode

    def send_signal(self, number: int) -> None:
        if not self._ended.is_set():
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)
