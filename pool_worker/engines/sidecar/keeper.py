"""A separate program that ends a server process and all its descendants together with the worker that owns it.

    python keeper.py STOP_LIMIT_S COMMAND…

The worker holds the other end of this program's standard input and writes nothing: end of file, for any cause (SIGKILL
too), means stop. The server gets SIGTERM, and SIGKILL after the limit; its remaining descendants are killed with it, so
that port and GPU are free for the next one. The exit code is the server's. Imports nothing of Spillway, to start fast
and stay small.
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
COMMAND_NOT_FOUND: Final = 127  # a shell's exit codes; so is the next
KILLED: Final = 128


def main() -> int:
    """Run the command; return its exit code."""
    stop_limit_s, command = float(sys.argv[1]), sys.argv[2:]
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # meant for the worker, which closes standard input when it is time
    try:
        server = subprocess.Popen(  # noqa: S603  # the operator's own command
            command,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            preexec_fn=partial(_reset_signals, os.getpid()),  # noqa: PLW1509  # no threads yet
        )
    except OSError as error:
        print(f"{command[0]}: {error.strerror}", file=sys.stderr)  # noqa: T201
        return COMMAND_NOT_FOUND
    threading.Thread(target=_stop_when_input_closes, args=(server, stop_limit_s), daemon=True).start()
    code = server.wait()
    _signal_all(server, signal.SIGKILL)  # remaining descendants
    return code if code >= 0 else KILLED - code


def _reset_signals(keeper: int) -> None:
    """Undo ignored signals, and die together with the keeper. ``keeper``: its process id."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != keeper:  # the keeper was killed before prctl: nothing would end this process
            os.kill(os.getpid(), signal.SIGKILL)


def _stop_when_input_closes(server: "subprocess.Popen[bytes]", stop_limit_s: float) -> None:
    while os.read(sys.stdin.fileno(), 1024):
        pass
    _signal_all(server, signal.SIGTERM)
    try:
        server.wait(stop_limit_s)
    except subprocess.TimeoutExpired:
        _signal_all(server, signal.SIGKILL)


def _signal_all(server: "subprocess.Popen[bytes]", number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):  # its group is empty
        os.killpg(server.pid, number)


if __name__ == "__main__":
    sys.exit(main())
