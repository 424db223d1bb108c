"""Worker processes on this machine: the embedded default, and what the fleet is tried with.

A process carries its labels in its environment, where a new controller finds them: nothing is written down that a
controller could die before writing.
"""

import asyncio
import contextlib
import json
import os
import signal
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import ClassVar, Final

import psutil

from fleet.errors import LaunchRefused
from fleet.machine import FLEET_LABEL, MACHINE_LABEL, POOL_LABEL, Order, ProviderMachine

LABELS: Final = "SPILLWAY_MACHINE_LABELS"  # the environment variable with a machine's labels, as JSON
LABELS_LIMIT_S: Final = 10.0  # until a new process has its environment: milliseconds, more on a busy machine
LABELS_POLL_S: Final = 0.001
END_LIMIT_S: Final = 10.0  # between SIGTERM and SIGKILL: the worker has been drained before


class ProcessDriver:
    """Starts ``spillway worker`` processes in separate sessions: they outlive the controller."""

    launches_once: ClassVar[bool] = True

    def __init__(
        self, fleet_id: str, pool: str, places: Sequence[str], *, log_dir: Path, command: Sequence[str]
    ) -> None:
        """``log_dir``: one file for each machine. ``command``: what starts a worker of the pool."""
        self._fleet_id = fleet_id
        self._pool = pool
        self._places = tuple(places)
        self._log_dir = log_dir
        self._command = tuple(command)
        self._launching = asyncio.Lock()  # so that the same order cannot run twice
        self._spawned: set[int] = set()  # process ids that are ours to reap

    @property
    def places(self) -> Sequence[str]:
        """The configured places, all of them this machine."""
        return self._places

    async def launch(self, order: Order) -> str:
        """Start a process; returns its id with its time of start. Raises LaunchRefused."""
        async with self._launching:
            for process, labels in await asyncio.to_thread(self._find):
                if labels[MACHINE_LABEL] == order.machine_id:
                    return id_of(process)
            try:
                pid = self._spawn(order)
            except OSError as error:
                raise LaunchRefused(f"{self._command[0]}: {error.strerror}") from error
            process = psutil.Process(pid)
            machine_id = id_of(process)  # before it may be reaped: it may have ended already
            self._spawned.add(pid)
            await asyncio.to_thread(_wait_for_labels, process)
            return machine_id

    def _spawn(self, order: Order) -> int:
        # asyncio and subprocess would hold on to a process that may outlive us, and watch it from a thread.
        self._log_dir.mkdir(parents=True, exist_ok=True)
        log_path = str(self._log_dir / f"{order.machine_id}.log")
        return os.posix_spawnp(  # the operator's own command
            self._command[0],
            self._command,
            {**os.environ, **order.environment, LABELS: json.dumps(dict(order.labels))},
            file_actions=[
                (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
                (os.POSIX_SPAWN_OPEN, 1, log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600),
                (os.POSIX_SPAWN_DUP2, 1, 2),
            ],
            setsid=True,
            setsigdef=[signal.SIGPIPE],  # Python ignores it, and a child would inherit that
        )

    def _reap(self) -> None:
        """Free the entries of ended processes in the system's table."""
        for pid in list(self._spawned):
            try:
                if os.waitpid(pid, os.WNOHANG) == (0, 0):
                    continue
            except ChildProcessError:
                pass  # another call has it
            self._spawned.discard(pid)

    async def machines(self) -> list[ProviderMachine]:
        """Return the processes that run."""
        return [ProviderMachine(id_of(process), labels) for process, labels in await asyncio.to_thread(self._find)]

    async def end(self, provider_id: str) -> None:
        """End a process and its children, by SIGKILL where SIGTERM does not do it."""
        await asyncio.to_thread(self._end, provider_id)

    async def close(self) -> None:
        """Do nothing: there is nothing to close."""

    def _find(self) -> list[tuple[psutil.Process, dict[str, str]]]:
        """Return this pool's processes with their labels. A worker's own children inherit these: they are left out."""
        self._reap()
        found: dict[str, tuple[int, psutil.Process, dict[str, str]]] = {}
        for process, labels in _labelled():
            if labels.get(FLEET_LABEL) == self._fleet_id and labels.get(POOL_LABEL) == self._pool:
                with contextlib.suppress(psutil.Error):
                    entry = (_start_of(process), process, labels)
                    eldest = found.setdefault(labels.get(MACHINE_LABEL, ""), entry)
                    if (entry[0], process.pid) < (eldest[0], eldest[1].pid):
                        found[labels.get(MACHINE_LABEL, "")] = entry
        return [(process, labels) for _, process, labels in found.values()]

    def _end(self, provider_id: str) -> None:
        for process, _ in self._find():
            if id_of(process) == provider_id:
                family = [process, *process.children(recursive=True)]
                process.terminate()
                _, alive = psutil.wait_procs(family, timeout=END_LIMIT_S)
                for one in alive:
                    with contextlib.suppress(psutil.NoSuchProcess):
                        one.kill()


def _wait_for_labels(process: psutil.Process) -> None:
    """Wait until a new process can be found by its labels, or has ended. At first Linux shows no environment of it."""
    deadline_s = time.monotonic() + LABELS_LIMIT_S
    with contextlib.suppress(psutil.Error):  # it has ended
        while LABELS not in process.environ() and process.status() != psutil.STATUS_ZOMBIE:
            if time.monotonic() >= deadline_s:
                return
            time.sleep(LABELS_POLL_S)


def _labelled() -> Iterator[tuple[psutil.Process, dict[str, str]]]:
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, ValueError, OSError):
            if process.status() == psutil.STATUS_ZOMBIE:
                continue
            labels = json.loads(process.environ().get(LABELS, "null"))
            if isinstance(labels, dict):
                yield process, labels


def id_of(process: psutil.Process) -> str:
    """Return an id that no later process has, as numbers of processes are used again. Raises psutil.Error."""
    return f"{process.pid}-{_start_of(process)}"


def _start_of(process: psutil.Process) -> int:
    """Return a process' start: the same whenever it is asked, and later for a later process. Raises psutil.Error.

    Linux counts it from the boot. psutil adds the time of the boot, which Linux gives in whole seconds and works out
    again at each call: correcting the clock by a millisecond may move it by a second.
    """
    try:
        stat = Path(f"/proc/{process.pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:  # another system, which stores the time itself, or an ended process, which psutil tells
        return int(process.create_time() * 1000)
    return int(stat.rpartition(")")[2].split()[_START_FIELD])


_START_FIELD: Final = (
    19  # of those after the program's name: https://man7.org/linux/man-pages/man5/proc_pid_stat.5.html
)
