"""Writers as processes of their own, forked fast."""

import asyncio
import logging
from pathlib import Path

from ledger.main import run
from ledger.settings import LedgerSettings
from tests import forks
from tests.waiting import HANGS_S


def write(settings: LedgerSettings, log: Path) -> None:
    """The whole life of a writer's process."""
    forks.begin(log)
    logging.basicConfig(level=logging.WARNING)
    asyncio.run(run(settings, on_ready=lambda _: print("ready", flush=True)))  # noqa: T201 - tests read it


class WriterProcess:
    def __init__(self, settings: LedgerSettings, log: Path) -> None:
        self.log = log
        log.touch()
        self._process = forks.context().Process(target=write, args=(settings, log))
        self._process.start()

    def said(self, text: str) -> int:
        """Return how often it has said so."""
        return self.log.read_text().count(text)

    def terminate(self) -> None:
        """SIGTERM it."""
        self._process.terminate()

    def wait(self) -> int:
        """Wait for its end; return the exit code."""
        self._process.join(HANGS_S)
        assert self._process.exitcode is not None
        return self._process.exitcode

    def end(self) -> None:
        """SIGKILL it, if it has not ended."""
        self._process.kill()
        self.wait()
