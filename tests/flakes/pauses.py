"""A pytest plugin that pauses at random around calls to the queue and to SQL, in the tests' own processes.

A test that takes the order of two tasks or processes for granted fails with it sooner than under load: what it
expects of one follows only from what the other has done. Not each failure is a defect: a pause may also let a time
limit pass, and calls of several tasks change places that keep their order otherwise.

``python -m tests.flakes tests/integration -- -p tests.flakes.pauses``
"""

import asyncio
import functools
import random
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncTransaction

from protocol.nats.bus import Bus, LastingClient

PAUSED = 0.15  # of the calls, once before and once after
PAUSED_MESSAGES = 0.025  # the same of incoming messages: all that come later wait, too, as on a slow network
LONGEST_S = 0.06
CALLS: list[tuple[type, str, float]] = [
    *((Bus, name, PAUSED) for name in ("api", "compare_and_set", "delete_message", "get_message")),
    *((Bus, name, PAUSED) for name in ("publish", "publish_durable", "request")),
    (LastingClient, "_process_msg", PAUSED_MESSAGES),
    (AsyncConnection, "execute", PAUSED),
    (AsyncTransaction, "commit", PAUSED),
]


def pytest_configure() -> None:
    patch = pytest.MonkeyPatch()
    for owner, name, share in CALLS:
        patch.setattr(owner, name, pausing(getattr(owner, name), share))


def pausing(call: Callable[..., Awaitable[Any]], share: float) -> Callable[..., Awaitable[Any]]:
    """Return the call, with a pause before and after this share of the calls."""

    @functools.wraps(call)
    async def paused(*arguments: Any, **options: Any) -> Any:
        await _pause(share)
        answer = await call(*arguments, **options)
        await _pause(share)
        return answer

    return paused


async def _pause(share: float) -> None:
    if random.random() < share:
        await asyncio.sleep(random.random() ** 2 * LONGEST_S)
