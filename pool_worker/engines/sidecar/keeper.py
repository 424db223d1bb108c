"""A separate program that ends one server process, and all it started, together with the worker that owns it.

    python keeper.py STOP_LIMIT_S COMMAND…

The worker holds the other end of our standard input and writes nothing: its end, however it came about (SIGKILL too),
is the order to stop. The server gets SIGTERM, and SIGKILL after the limit; what it has left behind is killed
with it, so that port and GPU are free for the next one. We exit as it did. Imports nothing of ours: it must start at
once, and stay small.
"""

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import threading
from functools import partial
from typing import Final

PR_SET_PDEATHSIG: Final = 1
COMMAND_NOT_FOUND: Final = 127  # exit codes of a shell, as is the next
KILLED: Final = 128


def main() -> int:
    """Run the command; return its exit code."""
    stop_limit_s, command = float(sys.argv[1]), sys.argv[2:]
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # meant for the worker, which closes our input when it is time
    try:
        server = subprocess.Popen(  # noqa: S603  # the operator's own command
            command,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            preexec_fn=partial(_like_any_other_process, os.getpid()),  # noqa: PLW1509  # there are no threads yet
        )
    except OSError as error:
        print(f"{command[0]}: {error.strerror}", file=sys.stderr)  # noqa: T201
        return COMMAND_NOT_FOUND
    threading.Thread(target=_end_with_the_worker, args=(server, stop_limit_s), daemon=True).start()
    code = server.wait()
    _signal_all(server, signal.SIGKILL)  # what has outlived it
    return code if code >= 0 else KILLED - code


def _like_any_other_process(keeper: int) -> None:
    """Undo what we ignore, and die with us should we be killed. ``keeper``: our process id."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != keeper:  # we were killed before that: nobody would end it
            os.kill(os.getpid(), signal.SIGKILL)


def _end_with_the_worker(server: "subprocess.Popen[bytes]", stop_limit_s: float) -> None:
    while os.read(sys.stdin.fileno(), 1024):
        pass
    _signal_all(server, signal.SIGTERM)
    try:
        server.wait(stop_limit_s)
    except subprocess.TimeoutExpired:
        _signal_all(server, signal.SIGKILL)


def _signal_all(server: "subprocess.Popen[bytes]", number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):  # nobody is left of its group
        os.killpg(server.pid, number)


if __name__ == "__main__":
    sys.exit(main())
