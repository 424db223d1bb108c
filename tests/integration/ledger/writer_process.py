"""Writers as processes of their own."""

from pathlib import Path

import uvloop

from ledger.main import run
from ledger.settings import LedgerSettings
from tests.forks import Process


def start_writer_process(settings: LedgerSettings, log: Path) -> Process:
    return Process(log, write, settings)


def write(settings: LedgerSettings) -> None:
    """Be a writer."""
    uvloop.run(run(settings, on_ready=lambda _: print("ready", flush=True)))  # noqa: T201 - tests read it
