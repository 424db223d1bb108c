"""PostgreSQL's log archive and base backups, as the overlay and the runbook have them."""

import shlex
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from tests.postgres import PostgresServer, find_program
from tests.unit.deploy.description import ROOT
from tests.waiting import HANGS_S

ARCHIVE_OVERLAY = ROOT / "deploy/compose/archive.yml"
RUNBOOKS = ROOT / "docs/deploy/runbooks.md"
HOST = ("--host", "127.0.0.1", "--username", "postgres")


@contextmanager
def shared_disk() -> Iterator[Path]:
    """A disk that outlives the home, which PostgreSQL's user may write to. The log goes to its folder ``wal``."""
    with tempfile.TemporaryDirectory(prefix="spillway-archive-") as name:
        folder = Path(name)
        (folder / "wal").mkdir()
        for path in (folder, folder / "wal"):
            path.chmod(0o777)
        yield folder


def archiving(archive: Path) -> dict[str, str]:
    """PostgreSQL's settings, as the overlay has them."""
    words = yaml.safe_load(ARCHIVE_OVERLAY.read_text())["services"]["postgres"]["command"]
    given = dict(word.split("=", 1) for word in words if "=" in word)
    return {name: value.replace("/archive/", f"{archive}/") for name, value in given.items()}


def options_of(program: str) -> list[str]:
    """What the runbook gives a program of PostgreSQL's, but the user, the database and the file."""
    [line] = [
        line for line in RUNBOOKS.read_text().splitlines() if f" {program} " in line and line.startswith("docker")
    ]
    words = shlex.split(line.partition(f"{program} ")[2].replace(">", " #").replace("<", " #"), comments=True)
    ours = {"--username", "--dbname", "--maintenance-db", "postgres", "spillway"}
    return [word for word in words if word not in ours]


def base_backup(server: PostgresServer, path: Path) -> None:
    with path.open("wb") as tar:
        command = [find_program("pg_basebackup"), *HOST, "--port", str(server.port), *options_of("pg_basebackup")]
        subprocess.run(command, stdout=tar, check=True)


def close_segment(server: PostgresServer, archive: Path) -> None:
    """Begin a new segment, in place of ``archive_timeout``, and wait until the old one is archived."""
    segment = query(server, "postgres", "SELECT pg_walfile_name(pg_switch_wal())")
    wait((archive / segment).exists)


def restore(server: PostgresServer, path: Path) -> None:
    """Restore a base backup and the archived log into a server without data, which is running afterwards."""
    data, owner = server.folder / "data", server.folder.stat()
    data.mkdir(mode=0o700)
    shutil.chown(data, owner.st_uid, owner.st_gid)
    with path.open("rb") as tar:
        server.run("tar", "-x", "-C", "data", stdin=tar)
    server.run("touch", "data/recovery.signal")
    server.start()
    wait(lambda: query(server, "postgres", "SELECT pg_is_in_recovery()") == "f")


def query(server: PostgresServer, database: str, statement: str) -> str:
    """The one value that a query has."""
    command = [find_program("psql"), *HOST, "--port", str(server.port), "--dbname", database]
    done = subprocess.run(
        [*command, "--tuples-only", "--no-align", "--command", statement], check=True, capture_output=True, text=True
    )
    return done.stdout.strip()


def wait(condition: Callable[[], Any]) -> None:
    deadline_s = time.monotonic() + HANGS_S
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.05)
