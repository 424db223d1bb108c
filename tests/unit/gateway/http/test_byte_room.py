"""A room of bytes that tenants share."""

import asyncio

import pytest

from gateway.errors import Overloaded
from gateway.http.body import ByteRoom


async def test_a_tenant_leaves_as_much_as_it_holds_and_others_enter() -> None:
    room = ByteRoom(100, 0.05)
    async with room.held("a", 50, "it"):
        with pytest.raises(Overloaded, match="to read it"):
            async with room.held("a", 1, "it"):
                pass
        async with room.held("b", 25, "it"):
            pass
    async with room.held("a", 50, "it"):
        pass


async def test_who_waits_enters_once_there_is_room() -> None:
    room = ByteRoom(100, 20.0)
    async with room.held("a", 50, "it"):
        entering = asyncio.create_task(_enter(room))
        await asyncio.sleep(0)
    await entering


async def _enter(room: ByteRoom) -> None:
    async with room.held("a", 50, "it"):
        pass
