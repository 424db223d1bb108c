"""Time limits that share a timer."""

import asyncio

from protocol.nats.bus import Deadlines, _end, shared_deadlines, wait_until_done
from tests.waiting import HANGS_S


async def test_due_entries_are_reported_in_order() -> None:
    late: list[str] = []
    deadlines = Deadlines(0.05, late.append)
    for thing in ("a", "b", "c"):
        deadlines.add(thing)
    deadlines.discard("b")
    assert deadlines.first() == "a"
    async with asyncio.timeout(HANGS_S):
        while len(late) < 2:
            await asyncio.sleep(0.01)
        deadlines.add("d")  # the timer runs again
        while len(late) < 3:
            await asyncio.sleep(0.01)
    assert late == ["a", "c", "d"]
    assert deadlines.first() is None


async def test_a_future_is_waited_for_without_being_cancelled() -> None:
    future: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    assert not await wait_until_done(future, 0.01)
    waiting = [asyncio.create_task(wait_until_done(future, 20.0)) for _ in range(2)]
    await asyncio.sleep(0)
    waiting[0].cancel()
    await asyncio.wait(waiting[:1])
    assert not future.cancelled()
    future.set_result("here")
    assert await waiting[1]
    assert shared_deadlines(20.0, _end).first() is None


async def test_a_loop_has_one_timer_for_each_limit() -> None:
    assert shared_deadlines(7.0, _end) is shared_deadlines(7.0, _end) is not shared_deadlines(8.0, _end)
