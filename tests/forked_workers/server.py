"""The process that workers are forked from."""

import contextlib
import os
import signal
import socket
import sys
import threading
from pathlib import Path

import pytest

from spillway.children import die_with_parent
from tests import forks

CODE = "from tests.forked_workers.server import main; main()"  # no `-m`: children would load that module, too
LONGEST_CODE_BYTES = 10_000


class _Importer:
    """Collects files, and no test of them: collecting the same test twice would escape its name twice."""

    def __init__(self) -> None:
        self.is_whole = True

    @pytest.hookimpl(tryfirst=True)
    def pytest_pycollect_makeitem(self) -> list[pytest.Item]:
        return []

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        self.is_whole &= report.passed


def main() -> None:
    """Import the tests that pytest would collect with these arguments, then fork for each client. Never returns.

    The first argument is the descriptor of the socket; without further ones nothing is imported.
    """
    die_with_parent()
    number, *arguments = sys.argv[1:]
    if arguments and not _import_tests(arguments):
        # pytest leaves a half imported module behind. The workers must import it themselves, and report what is wrong.
        os.execv(sys.executable, [sys.executable, "-c", CODE, number])
    if len(threading.enumerate()) > 1:
        sys.exit(f"importing the tests has started threads, which no forked process has: {threading.enumerate()}")
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the forked processes
    listener = socket.socket(fileno=int(number))
    while True:
        connection, _ = listener.accept()
        code, streams, _, _ = socket.recv_fds(connection, LONGEST_CODE_BYTES, 3)
        if os.fork() == 0:
            listener.close()
            _become(code.decode(), streams)
            sys.exit()  # which closes the connection
        for descriptor in (connection.detach(), *streams):
            os.close(descriptor)


def _import_tests(arguments: list[str]) -> bool:
    """Return whether all could be imported."""
    # A pool of threads of tokenizers would not live on in forked processes.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    importer = _Importer()
    with (
        Path(os.devnull).open("w") as devnull,
        contextlib.redirect_stdout(devnull),
        contextlib.redirect_stderr(devnull),
    ):
        options = ["-n", "0", "-p", "no:tests.forked_workers.plugin", "--collect-only", "-qq"]
        code = pytest.main([*arguments, *options], plugins=[importer])
    del os.environ["TOKENIZERS_PARALLELISM"]
    return importer.is_whole and code in {pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED}


def _become(code: str, streams: list[int]) -> None:
    """Be the Python process that was asked for."""
    die_with_parent()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for number, descriptor in enumerate(streams):
        os.dup2(descriptor, number)
        os.close(descriptor)
    sys.stdin = open(0, closefd=False)  # noqa: SIM115  # it stays open
    sys.argv = ["-c"]
    forks.start_server()  # while no thread runs
    exec(code, sys.modules["__main__"].__dict__)  # what `python -c` does
