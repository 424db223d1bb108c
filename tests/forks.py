"""Processes of ours that start in a fraction of a second: forked from a server that has imported everything already.

Each is a process of its own, with its own connections and log, and a real SIGKILL ends it; only the imports are shared.
No thread runs before the fork.
"""

import multiprocessing
import os
from multiprocessing.context import ForkServerContext
from pathlib import Path

from spillway.children import die_with_parent

# One server forks for all tests of a process, whichever of them comes first.
MODULES = (
    *("tests.chaos.workers", "tests.chaos.children", "tests.integration.ledger.writer_process"),
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
