"""At most one task of a key runs, and none is believed to run after its end."""

import asyncio

from gateway.limits.single_tasks import SingleTasks


async def test_a_key_has_one_task_at_a_time() -> None:
    tasks, ends = SingleTasks(), asyncio.Event()
    started = []

    async def work() -> None:
        started.append(1)
        await ends.wait()

    tasks.start("a", work)
    tasks.start("a", work)
    tasks.start("b", work)
    await asyncio.sleep(0)
    assert len(started) == 2
    assert "a" in tasks
    ends.set()
    await tasks.wait()
    assert "a" not in tasks


async def test_a_task_that_has_just_returned_is_started_again() -> None:
    tasks = SingleTasks()
    started = []

    async def work() -> None:
        started.append(1)

    async def ask_again() -> None:  # in the same turn of the loop, before the callbacks of the first task
        assert started == [1]
        tasks.start("a", work)

    tasks.start("a", work)
    await asyncio.create_task(ask_again())
    await tasks.wait()
    assert started == [1, 1]
    await asyncio.sleep(0)
    assert not tasks._tasks
