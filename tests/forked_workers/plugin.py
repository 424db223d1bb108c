"""The plugin, in the process that distributes the tests: ``pytest -n 6 -p tests.forked_workers.plugin``."""

import shlex
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from tests.forked_workers.server import CODE

CLIENT = Path(__file__).with_name("client.py")
ENDS_WITHIN_S = 30.0


@pytest.hookimpl(tryfirst=True)  # pytest-xdist starts its workers in this hook
def pytest_sessionstart(session: pytest.Session) -> None:
    """Start the server, and let pytest-xdist start its workers by the client."""
    config = session.config
    starts = getattr(config.option, "tx", None)
    if not starts or hasattr(config, "workerinput") or config.getoption("collectonly") or sys.platform != "linux":
        return
    folder = tempfile.TemporaryDirectory(prefix="spillway-forks-")
    config.add_cleanup(folder.cleanup)
    path = Path(folder.name, "socket")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()
        command = [sys.executable, "-c", CODE, str(listener.fileno()), *map(str, config.invocation_params.args)]
        server = subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds=[listener.fileno()])
    config.add_cleanup(lambda: _end(server))
    client = shlex.join([sys.executable, "-I", "-S", str(CLIENT), str(path)])
    config.option.tx = [f"popen//python={client}" for _ in starts]


def _end(server: "subprocess.Popen[bytes]") -> None:
    server.terminate()
    server.wait(ENDS_WITHIN_S)
