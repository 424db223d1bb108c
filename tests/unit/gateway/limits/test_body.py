import asyncio
from typing import Any

import pytest

from gateway.api.errors import BodyTooLarge, BodyTooSlow, ClientDisconnected
from gateway.limits.body import Receive, read_body

LIMIT_S = 20.0


def receiving(*messages: dict[str, Any]) -> Receive:
    left = list(messages)

    async def receive() -> dict[str, Any]:
        return left.pop(0)

    return receive


def part(body: bytes, *, more: bool = True) -> dict[str, Any]:
    return {"type": "http.request", "body": body, "more_body": more}


async def test_reads_all_parts() -> None:
    assert await read_body(receiving(part(b"ab"), part(b"c", more=False)), b"3", 3, LIMIT_S) == b"abc"


async def test_refuses_by_the_announced_length_without_reading() -> None:
    with pytest.raises(BodyTooLarge):
        await read_body(receiving(), b"4", 3, LIMIT_S)


async def test_refuses_at_the_bound_and_reads_no_further() -> None:
    with pytest.raises(BodyTooLarge):
        await read_body(receiving(part(b"ab"), part(b"cd")), None, 3, LIMIT_S)


async def test_a_caller_who_leaves() -> None:
    with pytest.raises(ClientDisconnected):
        await read_body(receiving(part(b"ab"), {"type": "http.disconnect"}), None, 3, LIMIT_S)


async def test_a_caller_who_says_nothing_more() -> None:
    async def receive() -> dict[str, Any]:
        await asyncio.Event().wait()
        raise AssertionError

    with pytest.raises(BodyTooSlow):
        await read_body(receive, b"3", 3, 0.01)
