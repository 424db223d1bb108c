"""Virtual time, which advances only when nothing is left to run, and simulated processes.

The loop is asyncio's except for waiting: instead of sleeping until the next timer, it sets its clock. Each callback
belongs to the process in whose context it was created (a context variable, which asyncio's tasks and timers inherit).
Callbacks of a killed process never run; those of a frozen process run when it continues. ``time`` and ``uuid`` are
replaced during a simulation (``simulated_world``); ``time.time`` returns the running process's idea of the time.
"""

import asyncio
import contextlib
import gc
import heapq
import random
import sys
import time
import uuid
import warnings
from collections.abc import Callable, Iterator
from contextvars import Context, ContextVar, copy_context
from typing import Any, TypeVar, TypeVarTuple

EPOCH_S = 1_790_000_000.0  # correct time at the start of a simulation
MAX_HANDLES = 40_000_000  # of one simulation; more means an endless loop
MAX_KEPT_TASKS = 2000
THREAD_S = 0.002  # until the result of work in a thread is known
TURN_S = 1e-6  # duration of one loop iteration, so that busy waiting makes progress


def _hand_on(take: Callable[[Any], None], what: Any) -> None:
    with contextlib.suppress(asyncio.InvalidStateError):  # it is no longer awaited
        take(what)


class SimulationStuck(Exception):
    """Raised when no event is left, or there are too many."""


class Process:
    """A simulated process: it owns all callbacks in its ``context``, which end with it."""

    def __init__(self, loop: "VirtualLoop", name: str, skew_s: float = 0.0) -> None:
        self.name = name
        self.skew_s = skew_s  # of its clock
        self.is_dead = False
        self.is_frozen = False
        self._loop = loop
        self._parked: list[_Handle] = []
        self.context: Context = copy_context()
        self.context.run(CURRENT.set, self)

    def kill(self) -> None:
        """End the process at once: none of its callbacks ever runs again."""
        self.is_dead = True
        self._parked.clear()

    def freeze(self) -> None:
        self.is_frozen = True

    def thaw(self) -> None:
        self.is_frozen = False
        parked, self._parked = self._parked, []
        self._loop.requeue(parked)

    def park(self, handle: "_Handle") -> None:
        self._parked.append(handle)

    def run(self, coroutine: Any) -> "asyncio.Task[Any]":
        """Run a coroutine in a task of the process."""
        return self._loop.create_task(coroutine, context=self.context.copy())

    def call_at(self, when_s: float, callback: Any, *args: Any) -> "_Handle":
        """Call back within the process."""
        return self._loop.call_at(when_s, callback, *args, context=self.context)


CURRENT: ContextVar[Process | None] = ContextVar("CURRENT", default=None)


class _Handle:
    """A minimal version of asyncio's handle: each simulation creates thousands."""

    __slots__ = ("_when_s", "args", "callback", "context", "is_cancelled")

    def __init__(self, callback: Any, args: Any, context: Context, when_s: float = 0.0) -> None:
        self.callback = callback
        self.args = args
        self.context = context
        self.is_cancelled = False
        self._when_s = when_s

    def cancel(self) -> None:
        self.is_cancelled = True
        self.callback = self.args = None

    def cancelled(self) -> bool:
        return self.is_cancelled

    def when(self) -> float:
        return self._when_s


_Arguments = TypeVarTuple("_Arguments")
_Result = TypeVar("_Result")


class _Task(asyncio.Task[Any]):
    """A task with a hash that does not depend on its memory address."""

    def __init__(self, coro: Any, loop: "VirtualLoop", number: int, name: str | None, context: Context | None) -> None:
        self._number = number
        self.process = CURRENT.get() if context is None else context.get(CURRENT)
        super().__init__(coro, loop=loop, name=name, context=context)

    def __hash__(self) -> int:
        return self._number

    def __eq__(self, other: object) -> bool:
        return self is other


def _is_unheard(task: _Task) -> bool:
    is_dead = task.process is not None and task.process.is_dead
    return bool(task._log_traceback) and not is_dead


class VirtualLoop(asyncio.BaseEventLoop):
    """An event loop without I/O and threads, whose clock jumps to the next timer."""

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 1000.0
        self.handles = 0  # run so far
        self.complaints: list[str] = []  # uncaught exceptions
        self._numbers = 0
        self._timers: list[tuple[float, int, _Handle]] = []  # timers of the same time in order of creation
        self._timers_made = 0
        self._kept: list[_Task] = []  # including those of dead processes, which must not run when they are collected
        self.set_exception_handler(self._complain)

    def time(self) -> float:
        return self.now_s

    def requeue(self, handles: list[_Handle]) -> None:
        self._ready.extend(handles)  # type: ignore[attr-defined]

    def create_task(self, coro: Any, *, name: str | None = None, context: Context | None = None) -> _Task:  # type: ignore[override]
        self._numbers += 1
        task = _Task(coro, self, self._numbers, name, context)
        self._kept.append(task)
        if len(self._kept) > MAX_KEPT_TASKS:
            self._kept = [task for task in self._kept if not task.done() or _is_unheard(task)]
        return task

    def unheard_errors(self) -> list[str]:
        """Return the errors of failed tasks that were never retrieved."""
        return [f"{task.get_coro()} failed: {task._exception!r}" for task in self._kept if _is_unheard(task)]

    def _complain(self, _loop: Any, context: dict[str, Any]) -> None:
        error = context.get("exception")
        self.complaints.append(f"{context.get('message')}: {error!r}")

    def call_soon(self, callback: Any, *args: Any, context: Context | None = None) -> _Handle:  # type: ignore[override]
        handle = _Handle(callback, args, copy_context() if context is None else context)
        self._ready.append(handle)  # type: ignore[attr-defined]
        return handle

    def call_at(self, when: float, callback: Any, *args: Any, context: Context | None = None) -> _Handle:  # type: ignore[override]
        timer = _Handle(callback, args, copy_context() if context is None else context, when)
        self._timers_made += 1
        heapq.heappush(self._timers, (when, self._timers_made, timer))
        return timer

    def call_later(self, delay: float, callback: Any, *args: Any, context: Context | None = None) -> _Handle:  # type: ignore[override]
        return self.call_at(self.now_s + delay, callback, *args, context=context)

    def _pass_time(self) -> None:
        """Advance to the next event, and schedule its callbacks."""
        ready, timers = self._ready, self._timers  # type: ignore[attr-defined]
        now_s = self.now_s + TURN_S
        if not ready:
            while timers and timers[0][2].is_cancelled:
                heapq.heappop(timers)
            if not timers:
                raise SimulationStuck("nothing is left to happen")
            now_s = max(now_s, timers[0][0])
        self.now_s = now_s
        while timers and timers[0][0] <= now_s:
            ready.append(heapq.heappop(timers)[2])
        self.handles += len(ready)
        if self.handles > MAX_HANDLES:
            raise SimulationStuck("too much happens")

    def _run_once(self) -> None:
        ready = self._ready  # type: ignore[attr-defined]
        while not self._stopping:  # type: ignore[attr-defined]
            self._pass_time()
            for _ in range(len(ready)):
                handle = ready.popleft()
                if handle.is_cancelled:
                    continue
                context = handle.context
                process = context.get(CURRENT)
                if process is not None and (process.is_dead or process.is_frozen):
                    if not process.is_dead:
                        process.park(handle)
                    continue
                try:
                    context.run(handle.callback, *handle.args)
                except (SystemExit, KeyboardInterrupt):
                    raise
                except BaseException as error:  # noqa: BLE001  # as asyncio's own
                    self.call_exception_handler(
                        {"message": f"a callback failed: {handle.callback}", "exception": error}
                    )

    def end_tasks(self) -> None:
        """Close the loop, with all unfinished tasks."""
        self.close()
        self._timers.clear()
        with _without_warnings():
            for task in self._kept:
                if not task.done():
                    task._log_destroy_pending = False  # type: ignore[attr-defined]
                    with contextlib.suppress(BaseException):
                        task.get_coro().close()
            self._kept.clear()

    def throw_away(self) -> None:
        """End all tasks, and collect their garbage."""
        self.end_tasks()
        self._ready.clear()  # type: ignore[attr-defined]
        with _without_warnings():
            gc.collect()

    def run_in_executor(
        self, executor: Any, func: Callable[[*_Arguments], _Result], *args: *_Arguments
    ) -> asyncio.Future[_Result]:
        """Run the function at once, as there are no threads; its result is known a little later."""
        ran: asyncio.Future[_Result] = self.create_future()
        try:
            result = func(*args)
        except Exception as error:  # noqa: BLE001  # handed on, as threads do
            self.call_later(THREAD_S, _hand_on, ran.set_exception, error)
        else:
            self.call_later(THREAD_S, _hand_on, ran.set_result, result)
        return ran


@contextlib.contextmanager
def _without_warnings() -> Iterator[None]:
    """Suppress the warnings of tasks that never ended."""
    hook, sys.unraisablehook = sys.unraisablehook, lambda _: None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
    sys.unraisablehook = hook


@contextlib.contextmanager
def simulated_world(loop: VirtualLoop, seed: int) -> Iterator[None]:
    """Take clocks from the loop and random numbers from the seed within this context."""
    ids = random.Random(f"ids {seed}")
    real = time.monotonic, time.time, time.time_ns, uuid.uuid4, random.getstate()

    def unix_s() -> float:
        process = CURRENT.get()
        return EPOCH_S + loop.now_s + (process.skew_s if process is not None else 0.0)

    time.monotonic = lambda: loop.now_s
    time.time = unix_s
    time.time_ns = lambda: int(unix_s() * 1e9)
    uuid.uuid4 = lambda: uuid.UUID(int=ids.getrandbits(128), version=4)
    random.seed(f"product {seed}")
    try:
        yield
    finally:
        time.monotonic, time.time, time.time_ns, uuid.uuid4 = real[:4]
        random.setstate(real[4])
