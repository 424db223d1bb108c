"""The process of a server that a pool's ``exec`` names: its life, and its output in the worker's log.

    worker ──owns──> keeper ──owns──> server (its own process group) ──> its descendants

The keeper (``keeper.py``) ends the server when its input is closed or the worker dies.
"""

import asyncio
import logging
import os
import shlex
import socket
import sys
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from pool_worker.engines.base import EngineDiedError
from protocol.process import PORT_PLACE, ending, stop_process, without_own_variables

KEEPER: Final = Path(__file__).with_name("keeper.py")
KEEPER_MARGIN_S: Final = 5.0  # on top of the server's own limit, for the keeper to end
READ_BYTES: Final = 64 * 1024
LOG_LINE_BYTES: Final = 4096  # longer lines are cut
LOG_LINES_PER_S: Final = 50  # average; a burst may have the next number of seconds' worth
LOG_BURST_S: Final = 10
LAST_WORDS: Final = 10
LAST_WORDS_CHARS: Final = 300  # of each

log = logging.getLogger(__name__)


class ServerProcess:
    """One life of the server."""

    def __init__(self, command: str, stop_limit_s: float, keeper_margin_s: float = KEEPER_MARGIN_S) -> None:
        """``command`` is split like a shell's, but no shell runs it; ``{port}`` becomes a free port."""
        self.port = _free_port() if PORT_PLACE in command else None
        self._command = [part.replace(PORT_PLACE, str(self.port)) for part in shlex.split(command)]
        self._stop_limit_s = stop_limit_s
        self._keeper_margin_s = keeper_margin_s
        self._lines = LogLines()
        self._keeper: asyncio.subprocess.Process | None = None
        self._copying: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Start the process; the server is not ready yet. Raises EngineDiedError if there is no such program."""
        self._keeper = await asyncio.create_subprocess_exec(
            *(sys.executable, "-S", str(KEEPER), str(self._stop_limit_s), *self._command),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            start_new_session=True,  # Ctrl-C is for the worker, which drains first
            env=_environment(os.environ, self.port),
        )
        assert self._keeper.stdout is not None  # noqa: S101  # requested above
        self._copying = asyncio.create_task(self._lines.copy(self._keeper.stdout), name="server log")
        log.info("started the server: %s", shlex.join(self._command))

    async def wait(self) -> EngineDiedError:
        """Wait until it has ended; return why, with its last log lines."""
        assert self._keeper is not None  # noqa: S101  # start was called
        code = await self._keeper.wait()
        if self._copying is not None:
            # Processes that inherited the pipe may keep it open.
            await asyncio.wait({self._copying}, timeout=self._keeper_margin_s)
        return EngineDiedError(f"the server ended with {ending(code)}; last log lines:\n  {self._lines.last_lines()}")

    async def stop(self) -> None:
        """End it, by SIGTERM, or by SIGKILL after its limit. Safe in any state."""
        keeper = self._keeper
        if keeper is None:
            return
        assert keeper.stdin is not None  # noqa: S101  # requested above
        margin_s = self._keeper_margin_s
        limit_s = self._stop_limit_s + margin_s
        await stop_process(keeper, "the server", limit_s, keeper.stdin.close, killed_limit_s=margin_s)
        if self._copying is not None:
            self._copying.cancel()
            await asyncio.wait({self._copying})


class LogLines:
    """Copies the server's output to the worker's log: long lines are cut, and lines above a rate are dropped."""

    def __init__(self) -> None:
        self._last: deque[str] = deque(maxlen=LAST_WORDS)
        self._allowed = float(LOG_BURST_S * LOG_LINES_PER_S)
        self._filled_s: float | None = None
        self._left_out = 0

    def last_lines(self) -> str:
        return "\n  ".join(self._last) or "(none)"

    async def copy(self, stream: asyncio.StreamReader) -> None:
        """Copy until the end."""
        head, is_cut = b"", False  # of an unfinished line
        while chunk := await stream.read(READ_BYTES):
            *ended, rest = chunk.split(b"\n")
            for part in ended:
                self._take(head + part, is_cut=is_cut)
                head, is_cut = b"", False
            is_cut = is_cut or len(head) + len(rest) > LOG_LINE_BYTES
            head = (head + rest)[:LOG_LINE_BYTES]
        if head:
            self._take(head, is_cut=is_cut)

    def _take(self, line: bytes, *, is_cut: bool) -> None:
        text = line[:LOG_LINE_BYTES].decode(errors="replace").rstrip()
        if is_cut or len(line) > LOG_LINE_BYTES:
            text += " … (cut)"
        if not text:
            return
        self._last.append(text[:LAST_WORDS_CHARS])
        if not self._may_log(asyncio.get_running_loop().time()):
            self._left_out += 1
            return
        if self._left_out:
            log.warning("dropped %d lines of the server's log: more than %d/s", self._left_out, LOG_LINES_PER_S)
            self._left_out = 0
        log.info("server: %s", text)

    def _may_log(self, now_s: float) -> bool:
        passed_s = 0.0 if self._filled_s is None else now_s - self._filled_s
        self._filled_s = now_s
        self._allowed = min(LOG_BURST_S * LOG_LINES_PER_S, self._allowed + passed_s * LOG_LINES_PER_S)
        if self._allowed < 1:
            return False
        self._allowed -= 1
        return True


def _environment(ours: Mapping[str, str], port: int | None) -> dict[str, str]:
    kept = without_own_variables(ours)
    return kept if port is None else {**kept, "PORT": str(port)}


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
