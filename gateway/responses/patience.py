"""Waiting for a queue server that is away: what was admitted, or is asked for, need not fail for that."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Final, TypeVar

from protocol.errors import BusError, StreamFull
from protocol.process import backoff_s

PATIENCE_S: Final = 10.0
LONGEST_WAIT_S: Final = 1.0

_Answer = TypeVar("_Answer")


async def patiently(ask: Callable[[], Awaitable[_Answer]], limit_s: float = PATIENCE_S) -> _Answer:
    """Ask until there is an answer. Raises the BusError that still stands after ``limit_s``, StreamFull at once."""
    until_s = time.monotonic() + limit_s
    for wait_s in backoff_s(LONGEST_WAIT_S):
        try:
            return await ask()
        except StreamFull:
            raise
        except BusError:
            if time.monotonic() + wait_s >= until_s:
                raise
        await asyncio.sleep(wait_s)
    raise AssertionError("unreachable")
