"""Free ports, and waiting until somebody listens on one."""

import asyncio
import socket
import time
from pathlib import Path
from typing import Final

POLL_S: Final = 0.05


def free_port() -> int:
    """A TCP port of 127.0.0.1 that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


async def wait_until_listening(process: asyncio.subprocess.Process, port: int, limit_s: float, log: Path) -> None:
    """Wait until the process accepts connections. Raises ChildProcessError if it ends, TimeoutError after the limit."""
    deadline_s = time.monotonic() + limit_s
    while time.monotonic() < deadline_s:
        if process.returncode is not None:
            raise ChildProcessError(f"ended with exit code {process.returncode}; see {log}")
        try:
            _, writer = await asyncio.open_connection("127.0.0.1", port)
        except OSError:
            await asyncio.sleep(POLL_S)
            continue
        writer.close()
        return
    raise TimeoutError(f"nobody listens on port {port} after {limit_s:g} s; see {log}")
