"""Waiting for what is away: longer each time, never all at once."""

import asyncio
import random
from collections.abc import Iterator
from typing import Final

FIRST_WAIT_S: Final = 0.1
LONGEST_WAIT_S: Final = 2.0  # what is added, at worst, to the outage of whatever is waited for


def backoff_s(longest_s: float = LONGEST_WAIT_S) -> Iterator[float]:
    """Yield waits in seconds, without end: doubling up to ``longest_s``, each jittered down to half of itself."""
    wait_s = FIRST_WAIT_S
    while True:
        yield wait_s * random.uniform(0.5, 1.0)  # noqa: S311
        wait_s = min(2 * wait_s, longest_s)


async def wait_for(event: asyncio.Event, limit_s: float) -> bool:
    """Wait until the event is set, at most ``limit_s``; whether it is."""
    try:
        async with asyncio.timeout(limit_s):
            return await event.wait()
    except TimeoutError:
        return event.is_set()
