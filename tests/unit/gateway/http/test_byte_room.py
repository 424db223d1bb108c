"""A memory budget that tenants share."""

import asyncio

import pytest

from gateway.errors import Overloaded
from gateway.http.body import MemoryBudget


async def test_other_tenants_can_enter() -> None:
    room = MemoryBudget(100, 0.05)
    async with room.held("a", 50, "the request's body"):
        with pytest.raises(Overloaded, match="to read the request's body"):
            async with room.held("a", 1, "the request's body"):
                pass
        async with room.held("b", 25, "the request's body"):
            pass
    async with room.held("a", 50, "the request's body"):
        pass


async def test_a_waiter_enters_when_memory_is_free() -> None:
    room = MemoryBudget(100, 20.0)
    async with room.held("a", 50, "the request's body"):
        entering = asyncio.create_task(_enter(room))
        await asyncio.sleep(0)
    await entering


async def _enter(room: MemoryBudget) -> None:
    async with room.held("a", 50, "the request's body"):
        pass
