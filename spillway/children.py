"""Child processes of ``spillway up``: started, watched until ready, restarted if they die, stopped in order."""

import asyncio
import contextlib
import ctypes
import json
import logging
import logging.handlers
import os
import signal
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final, Protocol

from protocol.errors import ExpectedError
from protocol.process import Restarts, ending, stop_process
from spillway import IS_WHEEL

READY_LIMIT_S: Final = 120.0  # not for workers: they wait for their engine and have a limit for that
READY_POLL_S: Final = 0.02
LOG_FILE_BYTES: Final = 10 * 1024 * 1024
LOG_FILES_KEPT: Final = 3
LOG_LINE_BYTES: Final = 64 * 1024
RESTART_WINDOW_S: Final = 60.0
MAX_RESTARTS_PER_WINDOW: Final = 5
FIRST_RESTART_WAIT_S: Final = 0.5
LAST_LINES: Final = 5
SIGNAL_GAP_S: Final = 0.2  # two signals in quick succession may be delivered as one
RESOLVED_CONFIG_NAME: Final = "config.json"

# -P: the working folder may contain an unrelated spillway.py or json.py. In a checkout, that folder may be needed.
PYTHON: Final = (sys.executable, "-P") if IS_WHEEL else (sys.executable,)


def run_dir_of(data_dir: Path) -> Path:
    """Return the folder of the lock, the children's ready files and the resolved configuration of ``up``."""
    return data_dir / "run"


def resolved_config_path(data_dir: Path) -> Path:
    """Return the path of the resolved configuration. The file exists while an ``up`` runs in this data folder."""
    return run_dir_of(data_dir) / RESOLVED_CONFIG_NAME


class ChildError(ExpectedError):
    """A child did not start or died too often. The message has its name and its last lines of output."""


def die_with_parent() -> None:
    """Ask Linux to end this child when its launcher is killed (prctl(2)), so that no process is orphaned."""
    if sys.platform == "linux":
        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGTERM)


def child_environment() -> dict[str, str]:
    """Return this process's environment, with OpenMP threads set to sleep while they wait.

    All processes share this machine's cores: a torch thread that spins at a barrier takes a core from the gateway.
    """
    return {"OMP_WAIT_POLICY": "passive", **os.environ}


class RestartableChild(Protocol):
    """A process that can be restarted after it has ended."""

    name: str
    log_path: Path

    async def start(self) -> None:
        """Start the process."""
        ...

    async def wait(self) -> int:
        """Wait for its end; return the exit code."""
        ...

    def last_lines(self) -> str:
        """Return the last lines of its output."""
        ...


class Child:
    """One ``spillway <command>`` process. Its output goes to a rotating log file."""

    def __init__(
        self,
        name: str,
        arguments: list[str],
        run_dir: Path,
        log_dir: Path,
        stop_limit_s: float,
        *,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """Describe the process. ``environment``: additional variables."""
        self.name = name
        self.environment = dict(environment or {})
        self.stop_limit_s = stop_limit_s
        self.log_path = log_dir / f"{name}.log"
        self._ready_path = run_dir / f"{name}.ready"
        self._arguments = [*arguments, "--ready-file", str(self._ready_path)]
        self._last_lines: deque[str] = deque(maxlen=LAST_LINES)
        self._process: asyncio.subprocess.Process | None = None
        self._copier: asyncio.Task[None] | None = None

    @property
    def pid(self) -> int:
        """Id of the process; 0 before the first start."""
        return 0 if self._process is None else self._process.pid

    @property
    def is_running(self) -> bool:
        """True while the process runs."""
        return self._process is not None and self._process.returncode is None

    async def start(self) -> None:
        """Start the process without waiting until it is ready."""
        self._ready_path.unlink(missing_ok=True)
        self._process = await asyncio.create_subprocess_exec(
            *(*PYTHON, "-m", "spillway", *self._arguments),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            start_new_session=True,  # Ctrl-C reaches only the launcher, which stops its children in order
            preexec_fn=die_with_parent,
            limit=LOG_LINE_BYTES,
            env=child_environment() | self.environment,
        )
        assert self._process.stdout is not None  # noqa: S101  # PIPE above
        self._copier = asyncio.create_task(self._copy_output(self._process.stdout), name=f"log-{self.name}")

    async def wait_ready(self) -> dict[str, Any]:
        """Wait for the child's ready file; return its content. Raises ChildError."""
        deadline_s = time.monotonic() + READY_LIMIT_S
        while time.monotonic() < deadline_s:
            facts = await self.facts_if_ready()
            if facts is not None:
                return facts
            await asyncio.sleep(READY_POLL_S)
        raise ChildError(f"{self.name} is not ready after {READY_LIMIT_S:g} s. See {self.log_path}")

    async def facts_if_ready(self) -> dict[str, Any] | None:
        """Return the content of the child's ready file; None while it is starting. Raises ChildError if it ended."""
        if self._ready_path.exists():
            return dict(json.loads(self._ready_path.read_text()))
        if self._process is None or self._process.returncode is not None:
            how = ending(await self.wait())
            raise ChildError(f"{self.name} failed to start ({how}):\n  {self.last_lines()}")
        return None

    async def wait(self) -> int:
        """Wait for the end of the process; return the exit code."""
        if self._process is None or self._copier is None:
            return 0
        code = await self._process.wait()
        await self._copier
        return code

    async def stop(self, force: asyncio.Event | None = None) -> None:
        """Stop it with SIGTERM, a second SIGTERM when ``force`` is set, and SIGKILL at its limit. Safe in any state."""
        if self._process is None:
            return
        forcing = asyncio.create_task(self._force(force or asyncio.Event()), name=f"force-{self.name}")
        try:
            await stop_process(self._process, self.name, self.stop_limit_s)
        finally:
            forcing.cancel()
        await self.wait()

    async def _force(self, force: asyncio.Event) -> None:
        await force.wait()
        if self._process is not None and self._process.returncode is None:
            await asyncio.sleep(SIGNAL_GAP_S)
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(signal.SIGTERM)

    def last_lines(self) -> str:
        """Return the last lines of its output."""
        return "\n  ".join(self._last_lines) or "(no output)"

    def last_event(self) -> str:
        """Return the event of its last line of output; empty without output."""
        return event_of(self._last_lines[-1]) if self._last_lines else ""

    async def _copy_output(self, stream: asyncio.StreamReader) -> None:
        handler = logging.handlers.RotatingFileHandler(
            self.log_path, maxBytes=LOG_FILE_BYTES, backupCount=LOG_FILES_KEPT, delay=True
        )
        with contextlib.closing(handler):
            while True:
                try:
                    line = await stream.readline()
                except ValueError:  # longer than LOG_LINE_BYTES: dropped by the reader
                    continue
                if not line:
                    return
                text = line.decode(errors="replace").rstrip()
                self._last_lines.append(text)
                handler.emit(logging.makeLogRecord({"msg": text}))


def event_of(line: str) -> str:
    """Return the event of a log line, without its time, level and process."""
    try:
        return str(json.loads(line)["event"])
    except (ValueError, TypeError, LookupError):  # output of another program
        return line


async def keep_running(child: RestartableChild, announce: Callable[[str], None]) -> None:
    """Restart a child whenever it ends. Raises ChildError if it dies too often."""
    restarts = Restarts(MAX_RESTARTS_PER_WINDOW, RESTART_WINDOW_S, FIRST_RESTART_WAIT_S)
    while True:
        code = await child.wait()
        wait_s = restarts.wait_s()
        if wait_s is None:
            raise ChildError(
                f"{child.name} died {restarts.most + 1} times within {restarts.window_s:g} s:\n  {child.last_lines()}"
            )
        announce(f"{child.name} ended with {ending(code)}; restarting it (log: {child.log_path})")
        await asyncio.sleep(wait_s)
        await child.start()
