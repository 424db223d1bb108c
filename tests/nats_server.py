"""A real nats-server for tests: own port, own folder, ended by id, restartable on the same port."""

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

from spillway.embedded_nats import ACCOUNTS


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class NatsServer:
    """One server process; ``kill`` and ``start`` again to play a crash (file streams survive, memory ones do not)."""

    START_LIMIT_S = 15.0

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.port = free_port()
        self.url = f"nats://127.0.0.1:{self.port}"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        binary = Path(sys.executable).with_name("nats-server")
        config = self.folder / "nats.conf"
        config.write_text(
            f"host: 127.0.0.1\nport: {self.port}\nmax_payload: 8MB\n"
            f'jetstream {{ store_dir: "{self.folder}" }}\n{ACCOUNTS}'
        )
        self._process = subprocess.Popen([str(binary), "-c", str(config), "-l", str(self.folder / "nats.log")])
        self._wait_until_listening()

    def _wait_until_listening(self) -> None:
        deadline = time.monotonic() + self.START_LIMIT_S
        while time.monotonic() < deadline:
            try:
                socket.create_connection(("127.0.0.1", self.port), timeout=1).close()
            except OSError:
                time.sleep(0.02)
                continue
            return
        log = self.folder / "nats.log"
        raise AssertionError(f"nats-server did not start: {log.read_text() if log.exists() else 'no log'}")

    def kill(self) -> None:
        """SIGKILL: no goodbye, no flush."""
        self._end(signal.SIGKILL)

    def stop(self) -> None:
        self._end(signal.SIGTERM)

    def _end(self, how: signal.Signals) -> None:
        if self._process is None:
            return
        os.kill(self._process.pid, how)
        self._process.wait(timeout=15)
        self._process = None
