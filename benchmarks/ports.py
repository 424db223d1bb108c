"""Finds free ports, and waits until a process listens on one."""

import asyncio
import atexit
import random
import socket
import time
from collections import deque
from pathlib import Path
from typing import Final

POLL_S: Final = 0.05
# Below the ports of outgoing connections (Linux: from 32768, others from 49152): thousands of those come and go during
# a load, and one may occupy a port that a server is about to use.
PORTS: Final = range(10_000, 32_000)
TRIES: Final = 1_000
CLAIMS: Final = 64  # maximum per process; above that the oldest claim is dropped, used or not

_claims: deque[socket.socket] = deque(maxlen=CLAIMS)


def free_port() -> int:
    """Return an unused TCP port of 127.0.0.1, claimed so that no other process gets it from this function.

    The claim is the UDP port of the same number, which is otherwise unused; it ends with the process. Raises OSError if
    no port is found.
    """
    for _ in range(TRIES):
        port = random.choice(PORTS)
        claim = socket.socket(type=socket.SOCK_DGRAM)
        try:
            claim.bind(("127.0.0.1", port))
            with socket.socket() as probe:
                probe.bind(("127.0.0.1", port))
        except OSError:
            claim.close()
            continue
        if len(_claims) == CLAIMS:
            _claims.popleft().close()
        _claims.append(claim)
        return port
    raise OSError(f"no free port found in {PORTS.start}-{PORTS.stop - 1} after {TRIES} tries")


@atexit.register
def _end_claims() -> None:
    while _claims:
        _claims.pop().close()


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
    raise TimeoutError(f"no listener on port {port} after {limit_s:g} s; see {log}")
