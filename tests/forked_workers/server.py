"""The process that workers are forked from."""

import os
import signal
import socket
import sys
import threading

import pytest

from spillway.children import die_with_parent

LONGEST_CODE_BYTES = 10_000


class _ImportsOnly:
    """Collects files, and no test of them: collecting the same test twice would escape its name twice."""

    @pytest.hookimpl(tryfirst=True)
    def pytest_pycollect_makeitem(self) -> list[pytest.Item]:
        return []


def main() -> None:
    """Import the tests that pytest would collect with these arguments, then fork for each client. Never returns."""
    die_with_parent()
    listener = socket.socket(fileno=int(sys.argv[1]))
    # A pool of threads of tokenizers would not live on in forked processes.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    arguments = [*sys.argv[2:], "-n", "0", "-p", "no:tests.forked_workers.plugin", "--collect-only", "-qq"]
    output = os.dup(1)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    pytest.main(arguments, plugins=[_ImportsOnly()])  # what went wrong, the workers report
    os.dup2(output, 1)
    del os.environ["TOKENIZERS_PARALLELISM"]
    if len(threading.enumerate()) > 1:
        sys.exit(f"importing the tests has started threads, which no forked process has: {threading.enumerate()}")
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the forked processes
    while True:
        connection, _ = listener.accept()
        code, streams, _, _ = socket.recv_fds(connection, LONGEST_CODE_BYTES, 3)
        if os.fork() == 0:
            listener.close()
            _become(code.decode(), streams)
            sys.exit()  # which closes the connection
        for descriptor in (connection.detach(), *streams):
            os.close(descriptor)


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
    exec(code, sys.modules["__main__"].__dict__)  # what `python -c` does
