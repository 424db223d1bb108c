"""Waiting in tests: for conditions, never for a time, and within a bound that only ends what hangs."""

import asyncio
import inspect
import time
from collections.abc import Callable
from typing import Any, Final

HANGS_S: Final = 300.0  # of one wait, on a machine with ten times the work it has cores for
HEALTHY_S: Final = 3.0  # for a server to answer that does: more than a machine with that work takes
POLL_S: Final = 0.01
LONGEST_POLL_S: Final = 0.05  # of what takes long: to look costs more than the time that is lost


async def until(condition: Callable[[], Any]) -> None:
    """Return once the condition, which may be a coroutine function, is true. Raises TimeoutError if it never is."""
    begun_s = time.monotonic()
    async with asyncio.timeout(HANGS_S):
        while True:
            is_true = condition()
            if await is_true if inspect.isawaitable(is_true) else is_true:
                return
            await asyncio.sleep(min(max(POLL_S, (time.monotonic() - begun_s) / 10), LONGEST_POLL_S))
