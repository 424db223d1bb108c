"""Timeouts raise TimeoutError on every Python that Spillway supports, also on Debian 12's 3.11.2."""

import asyncio
from collections.abc import Awaitable, Callable

import pytest


async def _cancelled_before() -> None:
    task = asyncio.current_task()
    assert task is not None
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asyncio.Event().wait()


async def _caught_a_groups_error() -> None:
    with pytest.raises(ExceptionGroup):
        async with asyncio.TaskGroup() as group:
            group.create_task(_failing())


async def _failing() -> None:
    raise ValueError


@pytest.mark.parametrize("before", [_cancelled_before, _caught_a_groups_error])
async def test_a_timeout_is_told_from_an_earlier_cancellation(before: Callable[[], Awaitable[None]]) -> None:
    await before()
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.0):
            await asyncio.Event().wait()
    async with asyncio.timeout(60.0):
        await asyncio.sleep(0)


async def test_a_cancellation_during_a_timeout_stays_one() -> None:
    async def waiting() -> None:
        async with asyncio.timeout(0.0):
            task = asyncio.current_task()
            assert task is not None
            task.cancel()
            await asyncio.Event().wait()

    task = asyncio.create_task(waiting())
    with pytest.raises(asyncio.CancelledError):
        await task
    assert task.cancelled()
