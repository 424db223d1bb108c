"""Time limits that share a timer: one for each costs more than most of what it watches."""

import asyncio
from collections import OrderedDict
from collections.abc import Callable
from contextvars import Context
from itertools import takewhile
from typing import Any, Generic, TypeVar
from weakref import WeakKeyDictionary

_Thing = TypeVar("_Thing")


class Deadlines(Generic[_Thing]):
    """Things that must each be discarded again within the same time, or something is done to them: with one timer."""

    def __init__(self, limit_s: float, on_due: Callable[[_Thing], None]) -> None:
        self._limit_s = limit_s
        self._on_due = on_due
        self._due_s: OrderedDict[_Thing, float] = OrderedDict()  # in the order in which they are due
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None

    def add(self, thing: _Thing) -> None:
        """From now on the time runs."""
        self._due_s[thing] = due_s = self._loop.time() + self._limit_s
        if self._timer is None:
            self._arm(due_s)

    def discard(self, thing: _Thing) -> None:
        """Nothing is waited for any more."""
        self._due_s.pop(thing, None)

    def first(self) -> _Thing | None:
        """Return the entry that has been waiting for longest."""
        return next(iter(self._due_s), None)

    def _arm(self, due_s: float) -> None:
        # In a context of its own: it is of all things together, not of the one that has come first.
        self._timer = self._loop.call_at(due_s, self._look, context=Context())

    def _look(self) -> None:
        now_s = self._loop.time()
        due = list(takewhile(lambda thing: self._due_s[thing] <= now_s, self._due_s))
        for thing in due:
            self.discard(thing)
        self._timer = None
        for thing in due:
            self._on_due(thing)
        first = self.first()
        if self._timer is None and first is not None:
            self._arm(self._due_s[first])


_of_loops: WeakKeyDictionary[asyncio.AbstractEventLoop, dict[tuple[float, Any], Deadlines[Any]]] = WeakKeyDictionary()


def shared_deadlines(limit_s: float, on_due: Callable[[_Thing], None]) -> Deadlines[_Thing]:
    """Return the running loop's deadlines of this limit; both arguments are constants, there are few of them."""
    of_loop = _of_loops.setdefault(asyncio.get_running_loop(), {})
    deadlines = of_loop.get((limit_s, on_due))
    if deadlines is None:
        deadlines = of_loop[limit_s, on_due] = Deadlines(limit_s, on_due)
    return deadlines


async def wait_until_done(future: asyncio.Future[Any], limit_s: float) -> bool:
    """Wait until the future is done, at most ``limit_s``, a constant; whether it is. It is never cancelled."""
    waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def wake(_: object) -> None:
        _end(waiter)

    limits = shared_deadlines(limit_s, _end)
    limits.add(waiter)
    future.add_done_callback(wake)
    try:
        await waiter
    finally:
        limits.discard(waiter)
        future.remove_done_callback(wake)
    return future.done()


def _end(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_result(None)
