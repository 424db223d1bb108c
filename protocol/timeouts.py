"""Mends ``asyncio.timeout`` and ``asyncio.TaskGroup`` of earlier Pythons. Debian 12 has 3.11.2.

Up to Python 3.12, a cancellation that meets an error of a TaskGroup is lost: the error is raised, and who handles it
continues. A gateway that was stopped while its queue server did not answer never ended. Python 3.13 cancels again
(https://github.com/python/cpython/issues/116720).

In Python 3.11.0 to 3.11.2, a timeout in a task that was cancelled before raises CancelledError instead of
TimeoutError. It does the same in a task that has caught an error of a TaskGroup, because the group leaves the task's
count of cancellations above zero.
Python 3.11.3 compares with the count at entry instead (https://github.com/python/cpython/issues/102780).
"""

import asyncio
from types import TracebackType


def mend_task_groups() -> None:
    """Let a task that was cancelled while a group's error was on its way be cancelled again."""
    enter, leave = asyncio.TaskGroup.__aenter__, asyncio.TaskGroup.__aexit__

    async def aenter(self: asyncio.TaskGroup) -> asyncio.TaskGroup:
        self._cancelling = _cancelling()  # type: ignore[attr-defined]
        return await enter(self)

    async def aexit(
        self: asyncio.TaskGroup,
        error_type: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        has_cancelled = self._parent_cancel_requested  # type: ignore[attr-defined]
        try:
            await leave(self, error_type, error, traceback)
        except BaseExceptionGroup:
            task = asyncio.current_task()
            if task is not None:
                if self._parent_cancel_requested and not has_cancelled:  # type: ignore[attr-defined]
                    task.uncancel()  # the group's own request, which it forgets to take back
                if task.cancelling() > self._cancelling:  # type: ignore[attr-defined]
                    task.uncancel()
                    task.cancel()
            raise

    asyncio.TaskGroup.__aenter__ = aenter  # type: ignore[method-assign,assignment]
    asyncio.TaskGroup.__aexit__ = aexit  # type: ignore[method-assign,assignment]


def mend_timeouts() -> None:
    """Let every timeout of this process compare the count of cancellations with the count at its entry."""
    enter, leave = asyncio.Timeout.__aenter__, asyncio.Timeout.__aexit__

    async def aenter(self: asyncio.Timeout) -> asyncio.Timeout:
        self._cancelling = _cancelling()  # type: ignore[attr-defined]  # the name of Python 3.11.3
        return await enter(self)

    async def aexit(
        self: asyncio.Timeout,
        error_type: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await leave(self, error_type, error, traceback)
        is_own = _cancelling() <= self._cancelling  # type: ignore[attr-defined]
        if self.expired() and error_type is asyncio.CancelledError and is_own:
            raise TimeoutError from error

    asyncio.Timeout.__aenter__ = aenter  # type: ignore[method-assign]
    asyncio.Timeout.__aexit__ = aexit  # type: ignore[method-assign,assignment]


def _cancelling() -> int:
    task = asyncio.current_task()
    return task.cancelling() if task else 0
