"""A worker in a separate process, for tests of signals and sudden exits."""

import asyncio
import tempfile
from pathlib import Path

import uvloop

from pool_worker.main import run
from pool_worker.settings import WorkerSettings
from tests.forks import Process


class WorkerProcess(Process):
    """Its log is a temporary file, which ``kill`` removes: every test must call that in the end."""

    def kill(self) -> None:
        super().kill()
        self.log.unlink(missing_ok=True)


def start_process(settings: WorkerSettings) -> WorkerProcess:
    with tempfile.NamedTemporaryFile(prefix="spillway-worker-", suffix=".log", delete=False) as log:
        return WorkerProcess(Path(log.name), work, settings)


def work(settings: WorkerSettings) -> None:
    """Be a worker."""
    uvloop.run(run(settings, on_ready=lambda _task: print("ready", flush=True)))  # noqa: T201 - tests read it


async def finish(process: WorkerProcess) -> tuple[int, str]:
    """Wait until it has ended; return its exit status and its log."""
    status = await asyncio.to_thread(process.wait)
    return status, process.log.read_text()
