"""Processes of ours that start in a fraction of a second: forked from a server that has imported everything already.

Each is a process of its own, with its own connections and log, and a real SIGKILL ends it; only the imports are shared.
No thread runs before the fork.
"""

import logging
import multiprocessing
import multiprocessing.forkserver
import multiprocessing.resource_tracker
import multiprocessing.util
import os
import signal
import sys
from collections.abc import Callable
from multiprocessing.context import ForkServerContext
from pathlib import Path
from unittest import mock

from spillway.children import die_with_parent
from tests.waiting import HANGS_S

# One server forks for all tests of a process, whichever of them comes first.
MODULES = (
    *("tests.chaos.workers", "tests.chaos.children", "tests.integration.ledger.writer_process"),
    *("tests.integration.pool_worker.worker_process", "tests.integration.ledger.webhooks.ledger_process"),
    *("pool_worker.engines", "spillway.cli.gateway", "spillway.cli.ledger"),
)


def context(*further: str) -> ForkServerContext:
    """Return what makes the processes. ``further``: modules that they need besides."""
    forks = multiprocessing.get_context("forkserver")
    forks.set_forkserver_preload([*MODULES, *further])
    return forks


def begin(log: Path) -> None:
    """Begin the life of a forked process: its output goes to the log, and it ends with us."""
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(file, stream)
    die_with_parent()


def start_server() -> None:
    """Start the server that forks, now, as a fork of this process: it imports nothing. No thread may run here."""
    context().set_forkserver_preload([name for name in MODULES if name in sys.modules])
    multiprocessing.resource_tracker.ensure_running()
    with mock.patch.object(multiprocessing.util, "spawnv_passfds", _fork):
        multiprocessing.forkserver.ensure_running()


def _fork(_path: str, arguments: list[str], _descriptors: list[int]) -> int:
    process_id = os.fork()
    if process_id == 0:
        try:
            die_with_parent()
            exec(arguments[-1])  # the server's code
        finally:
            os._exit(0)
    return process_id


def _renew_thread_pool() -> None:
    """Make torch's pool of threads again, while this process has one thread.

    After a fork torch does so on first use, and threads that use it meanwhile find none: "Invalid thread pool!"
    """
    if (torch := sys.modules.get("torch")) is not None:
        torch.set_num_threads(torch.get_num_threads())


os.register_at_fork(after_in_child=_renew_thread_pool)


class Process:
    """A forked process that runs ``life(*arguments)``."""

    def __init__(self, log: Path, life: Callable[..., None], *arguments: object) -> None:
        self.log = log
        log.touch()
        self._process = context().Process(target=_live, args=(log, life, *arguments))
        self._process.start()

    def said(self, text: str) -> int:
        """Return how often it has said so."""
        return self.log.read_text().count(text)

    def send_signal(self, number: signal.Signals) -> None:
        """Send a signal to it, if it has not ended."""
        if self._process.exitcode is None:
            assert self._process.pid is not None
            os.kill(self._process.pid, number)

    def terminate(self) -> None:
        """SIGTERM it."""
        self.send_signal(signal.SIGTERM)

    def wait(self) -> int:
        """Wait for its end; return the exit code."""
        self._process.join(HANGS_S)
        assert self._process.exitcode is not None
        return self._process.exitcode

    def kill(self) -> None:
        """SIGKILL it, if it has not ended, and wait for its end."""
        self._process.kill()
        self.wait()


def _live(log: Path, life: Callable[..., None], *arguments: object) -> None:
    begin(log)
    logging.basicConfig(level=logging.INFO)
    life(*arguments)
