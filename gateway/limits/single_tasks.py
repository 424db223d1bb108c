"""Tasks by key, of which at most one runs for each key."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any


class SingleTasks:
    """Starts a key's task unless it is running."""

    def __init__(self) -> None:
        self._tasks: dict[str, asyncio.Task[None]] = {}

    def start(self, key: str, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Start the key's task unless one is running.

        A task that has returned is not running, even before its callbacks are called: it no longer sees what its
        caller has just asked for.
        """
        if key in self:
            return
        task = self._tasks[key] = asyncio.create_task(work())
        task.add_done_callback(lambda ended: self._forget(key, ended))

    def __contains__(self, key: str) -> bool:
        """Return whether the key's task is running."""
        task = self._tasks.get(key)
        return task is not None and not task.done()

    async def wait(self) -> None:
        """Wait until all tasks that are running now have ended."""
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)

    def cancel(self) -> None:
        """Cancel all tasks."""
        for task in self._tasks.values():
            task.cancel()

    def _forget(self, key: str, ended: asyncio.Task[None]) -> None:
        if self._tasks.get(key) is ended:
            del self._tasks[key]
