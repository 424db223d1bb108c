"""Timeouts and groups of tasks work on every Python that Spillway supports, also on Debian 12's 3.11.2."""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable

import pytest

from tests.waiting import HANGS_S


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


@pytest.mark.parametrize("is_first", [True, False], ids=["then an error", "after an error"])
async def test_a_cancellation_that_meets_an_error_of_a_group_is_not_lost(is_first: bool) -> None:
    """Regression: a gateway that was stopped while its queue server did not answer never ended."""

    async def fail(group_of: asyncio.Task[None]) -> None:
        if is_first:
            group_of.cancel()
        else:
            asyncio.get_running_loop().call_soon(group_of.cancel)
        raise ValueError

    async def last(is_over: asyncio.Event) -> None:
        try:
            await is_over.wait()
        finally:
            await asyncio.sleep(0.01)  # the group waits for its end

    async def repairing() -> None:
        task = asyncio.current_task()
        assert task is not None
        with contextlib.suppress(ExceptionGroup):
            async with asyncio.TaskGroup() as group:
                group.create_task(last(asyncio.Event()))
                group.create_task(fail(task))
        await asyncio.sleep(HANGS_S)

    repair = asyncio.create_task(repairing())
    with pytest.raises(asyncio.CancelledError):
        await repair


async def test_an_error_of_a_group_leaves_no_cancellation() -> None:
    await _caught_a_groups_error()
    task = asyncio.current_task()
    assert task is not None
    assert task.cancelling() == 0
    await asyncio.sleep(0)
