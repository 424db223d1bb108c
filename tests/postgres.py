"""A real PostgreSQL for tests: a private cluster in its own folder, own port, ended by id, restartable."""

import asyncio
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import IO

import asyncpg
import psutil

from benchmarks.ports import free_port
from tests.waiting import HANGS_S

TEMPLATE = "spillway_template"
# Each database is some 300 files, and ext4 makes files slowly where others have just been removed (it looks for an
# inode that has not been used of late): half a second of processor time for each test's database, 10 ms in memory.
MEMORY = Path("/dev/shm")
MEMORY_ROOM_BYTES = 1 << 31  # several servers at once need some 200 MB each


class PostgresMissing(AssertionError):
    pass


def find_program(name: str) -> str:
    found = shutil.which(name)
    if found is None:
        newest_first = sorted(Path("/usr/lib/postgresql").glob(f"*/bin/{name}"), reverse=True)
        found = str(newest_first[0]) if newest_first else None
    if found is None:
        raise PostgresMissing(f"PostgreSQL's {name} is not installed: run `make test`, which installs PostgreSQL")
    return found


class PostgresServer:
    """One cluster; ``stop`` and ``start`` again to play an outage."""

    def __init__(
        self, fsync: str = "off", niceness: int = 0, further_settings: Mapping[str, str] | None = None
    ) -> None:
        self._fsync = fsync
        self._niceness = niceness
        self._further_settings = further_settings or {}
        # Not under pytest's own folder: PostgreSQL refuses to run as root, and its user may not look in there.
        in_memory = fsync == "off" and MEMORY.is_dir() and shutil.disk_usage(MEMORY).free >= MEMORY_ROOM_BYTES
        self.folder = Path(tempfile.mkdtemp(prefix="spillway-postgres-", dir=MEMORY if in_memory else None))
        self.port = free_port()
        self._user: str | None = None
        self._groups: list[str] | None = None
        if os.geteuid() == 0:
            self._user, self._groups = "postgres", []
            shutil.chown(self.folder, "postgres", "postgres")
        self._process: subprocess.Popen[bytes] | None = None
        self._databases = 0

    def create(self) -> None:
        command = [find_program("initdb"), "-D", str(self.folder / "data"), "-U", "postgres", "-A", "trust"]
        command += ["-E", "UTF8", "--locale", "C", "--no-sync"]
        self.run(*command)

    def run(self, *command: str, stdin: IO[bytes] | None = None) -> None:
        """Run a program as the server's user, in its folder."""
        subprocess.run(
            command,
            check=True,
            stdin=stdin,
            capture_output=True,
            cwd=self.folder,
            user=self._user,
            group=self._user,
            extra_groups=self._groups,
        )

    def start(self) -> None:
        settings = {
            "listen_addresses": "127.0.0.1",
            "port": self.port,
            "unix_socket_directories": "",
            "fsync": self._fsync,
            "max_connections": 50,
            "shared_buffers": "32MB",
            "max_wal_size": "64MB",
            **self._further_settings,
        }
        command = ["nice", "-n", str(self._niceness), find_program("postgres"), "-D", str(self.folder / "data")]
        command += [part for name, value in settings.items() for part in ("-c", f"{name}={value}")]
        with (self.folder / "postgres.log").open("ab") as log:
            self._process = subprocess.Popen(
                command,
                stdout=log,
                stderr=log,
                cwd=self.folder,
                user=self._user,
                group=self._user,
                extra_groups=self._groups,
                start_new_session=True,  # Ctrl-C ends the tests, and these end it
            )
        deadline = time.monotonic() + HANGS_S
        while time.monotonic() < deadline and self._process.poll() is None:
            try:
                self.execute("SELECT 1")
            except (OSError, asyncpg.PostgresError):
                time.sleep(0.02)
                continue
            return
        raise AssertionError(f"PostgreSQL did not start: {(self.folder / 'postgres.log').read_text()}")

    def stop(self, *, crash: bool = False) -> None:
        """Fast shutdown: open connections are cut. A crash is one that writes nothing more, either."""
        if self._process is not None:
            self._process.send_signal(signal.SIGQUIT if crash else signal.SIGINT)
            self._process.wait(timeout=HANGS_S)
            self._process = None

    def freeze(self) -> None:
        """Stop all its processes: connections stay open, new ones are taken by the kernel, and nobody answers."""
        assert self._process is not None
        postmaster = psutil.Process(self._process.pid)
        postmaster.suspend()  # from now on no child that ends disappears
        for child in postmaster.children():
            child.suspend()

    def thaw(self) -> None:
        assert self._process is not None
        postmaster = psutil.Process(self._process.pid)
        for child in postmaster.children():
            child.resume()
        postmaster.resume()

    def remove(self) -> None:
        self.stop()
        shutil.rmtree(self.folder)

    def execute(self, statement: str) -> None:
        asyncio.run(self._execute(statement))

    async def _execute(self, statement: str) -> None:
        connection = await asyncpg.connect(self.url("postgres"), timeout=HANGS_S)
        try:
            await connection.execute(statement)
        finally:
            await connection.close()

    def url(self, database: str) -> str:
        return f"postgresql://postgres@127.0.0.1:{self.port}/{database}"

    def new_database(self, template: str = "template0") -> str:
        """Create a database and return its name."""
        self._databases += 1
        name = f"test_{self._databases}"
        self.execute(f"CREATE DATABASE {name} TEMPLATE {template}")
        return name

    def drop_database(self, name: str) -> None:
        self.execute(f"DROP DATABASE {name} WITH (FORCE)")
