import asyncio
import threading
from collections.abc import Coroutine, Iterator
from functools import partial
from operator import contains
from typing import Any

import pytest

from gateway.api.errors import form_of
from gateway.errors import Overloaded, RateLimitExceeded
from gateway.tokenizing.encoder_pool import LONG_BYTES, MAX_BYTES, MAX_TENANT_BYTES, MAX_TENANT_ITEMS, EncoderPool
from tests.waiting import until

LONG = LONG_BYTES + 1
THREADS = 3


class Stage:
    """A pool whose work blocks its thread until released."""

    def __init__(self) -> None:
        self.pool = EncoderPool(THREADS)
        self.begun: list[str] = []
        self._gates: dict[str, threading.Event] = {}
        self._tasks: list[asyncio.Task[str]] = []

    def give(self, tenant: str, name: str, size_bytes: int = 1, **how: Any) -> asyncio.Task[str]:
        gate = self._gates[name] = threading.Event()

        def work() -> str:
            self.begun.append(name)
            gate.wait()
            return name

        task = asyncio.create_task(self.pool.run(tenant, size_bytes, work, **how))
        self._tasks.append(task)
        return task

    async def let_go(self, *names: str) -> None:
        for name in names:
            self._gates[name].set()
        await until(lambda: all(self._is_done(name) for name in names))

    def _is_done(self, name: str) -> bool:
        return any(task.done() and not task.cancelled() and task.result() == name for task in self._tasks)

    def close(self) -> None:
        for gate in self._gates.values():
            gate.set()
        self.pool.close()


@pytest.fixture
def stage() -> Iterator[Stage]:
    stage = Stage()
    yield stage
    stage.close()


async def code_of(asked: Coroutine[Any, Any, Any]) -> tuple[int, str | None]:
    with pytest.raises((RateLimitExceeded, Overloaded)) as caught:
        await asked
    return form_of(caught.value).status, caught.value.code


async def test_one_tenants_long_work_leaves_threads_for_others(stage: Stage) -> None:
    """One key's long prompts once held all threads."""
    for number in range(4):
        stage.give("greedy", f"greedy {number}", LONG)
    await until(lambda: stage.begun == ["greedy 0"])
    stage.give("innocent", "long", LONG)
    stage.give("innocent", "short")
    await until(lambda: sorted(stage.begun) == ["greedy 0", "long", "short"])


async def test_long_work_of_many_leaves_a_thread_for_short_work(stage: Stage) -> None:
    for number in range(THREADS + 1):
        stage.give(f"greedy {number}", f"long {number}", LONG)
    await until(lambda: len(stage.begun) == THREADS - 1)
    stage.give("innocent", "short")
    stage.give("innocent", "quick", LONG, is_quick=True)
    await until(lambda: "short" in stage.begun)
    await stage.let_go("short")
    await until(lambda: "quick" in stage.begun)
    assert len(stage.begun) == THREADS + 1


async def test_tenants_take_turns(stage: Stage) -> None:
    blocking = [f"blocking {number}" for number in range(THREADS)]
    for name in blocking:
        stage.give("others", name)
    for name in ("a1", "a2", "a3"):
        stage.give("a", name)
    for name in ("b1", "b2"):
        stage.give("b", name)
    await until(lambda: len(stage.begun) == THREADS)
    order = ["a1", "b1", "a2", "b2", "a3"]
    await stage.let_go(blocking[0])
    for name in order:
        await until(partial(contains, stage.begun, name))
        await stage.let_go(name)
    assert stage.begun[THREADS:] == order


async def test_waiting_work_is_bounded(stage: Stage) -> None:
    quarter = MAX_TENANT_BYTES // 4
    for number in range(4):
        stage.give("greedy", f"greedy {number}", quarter)
    await until(lambda: stage.begun == ["greedy 0"])
    assert await code_of(stage.pool.run("greedy", 1, list)) == (429, "rate_limit_exceeded")
    for number in range(MAX_BYTES // MAX_TENANT_BYTES - 1):
        stage.give(f"another {number}", f"another {number}", MAX_TENANT_BYTES)
    await until(lambda: len(stage.begun) == 2)
    assert await code_of(stage.pool.run("the last", 1, list)) == (503, "overloaded")
    await stage.let_go("greedy 0")
    assert await stage.pool.run("the last", 1, lambda: 5) == 5
    for number in range(MAX_TENANT_ITEMS - 3):  # the other three are already waiting
        stage.give("greedy", f"small {number}")
    await asyncio.sleep(0)  # let the task enqueue its item
    assert await code_of(stage.pool.run("greedy", 1, list)) == (429, "rate_limit_exceeded")


async def test_a_canceled_caller_frees_its_slot(stage: Stage) -> None:
    for number in range(THREADS):
        stage.give("others", f"blocking {number}")
    leaving = stage.give("greedy", "left", MAX_TENANT_BYTES)
    await until(lambda: len(stage.begun) == THREADS)
    leaving.cancel()
    await asyncio.wait({leaving})
    stage.give("greedy", "next", MAX_TENANT_BYTES)
    await stage.let_go("blocking 0")
    await until(lambda: "next" in stage.begun)
    assert "left" not in stage.begun


async def test_errors_reach_only_their_callers(stage: Stage) -> None:
    def fail() -> None:
        raise LookupError("no")

    with pytest.raises(LookupError):
        await stage.pool.run("a", 10**6, fail)  # large enough to trim memory
    assert await stage.pool.run("a", 10**6, lambda: 5) == 5
