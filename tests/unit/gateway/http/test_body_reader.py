"""Bodies share a memory budget, and slow senders of one tenant do not block other tenants."""

import asyncio
from typing import Any

import pytest

from gateway.errors import Overloaded
from gateway.http.body import FREE_BYTES, LARGE_BODY_BYTES, MAX_RATIO, BodyReader
from gateway.settings import LimitSettings

SIZE = 2 * LARGE_BODY_BYTES
LENGTH = {b"content-length": str(SIZE).encode()}
LIMIT_S = 20.0


class Sender:
    """A client that sends its body on command."""

    def __init__(self, reader: BodyReader, tenant: str, headers: dict[bytes, bytes] = LENGTH) -> None:
        self.is_read = asyncio.Event()
        self.may_send = asyncio.Event()
        self.task = asyncio.create_task(reader.read(tenant, self._receive, headers))

    async def _receive(self) -> dict[str, Any]:
        self.is_read.set()
        await self.may_send.wait()
        return {"type": "http.request", "body": b"x" * SIZE, "more_body": False}


def reader_of(bodies: int, limit_s: float = LIMIT_S) -> BodyReader:
    return BodyReader(LimitSettings(max_body_bytes=SIZE, max_reading_bytes=bodies * SIZE), limit_s)


async def settled() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


async def test_a_tenant_holds_no_more_than_it_leaves_free() -> None:
    reader = reader_of(4)
    first, second, third = (Sender(reader, "a") for _ in range(3))
    await settled()
    assert [sender.is_read.is_set() for sender in (first, second, third)] == [True, True, False]
    other = Sender(reader, "b")
    await other.is_read.wait()
    other.may_send.set()
    assert len(await other.task) == SIZE
    first.may_send.set()
    await third.is_read.wait()
    for sender in (second, third):
        sender.may_send.set()
        await sender.task


async def test_an_early_exit_releases_its_memory() -> None:
    reader = reader_of(2)
    gone, waiting, left = Sender(reader, "a"), Sender(reader, "a"), Sender(reader, "a")
    await settled()
    left.task.cancel()
    await settled()
    gone.task.cancel()
    await waiting.is_read.wait()
    waiting.task.cancel()


async def test_a_body_of_unknown_length_reserves_the_maximum() -> None:
    reader = reader_of(2)
    first, second = Sender(reader, "a", {}), Sender(reader, "a", {})
    await settled()
    assert (first.is_read.is_set(), second.is_read.is_set()) == (True, False)
    for sender in (first, second):
        sender.may_send.set()
        await sender.task


async def test_small_bodies_never_wait() -> None:
    reader = reader_of(2)
    large = Sender(reader, "a")
    small = [Sender(reader, "a", {b"content-length": b"10"}) for _ in range(50)]
    for sender in small:
        await sender.is_read.wait()
        sender.task.cancel()
    large.task.cancel()


async def test_a_timeout_is_reported() -> None:
    reader = reader_of(2, limit_s=0.05)
    await reader._room._enter("a", SIZE, "a body")  # never released
    sender = Sender(reader, "a")
    with pytest.raises(Overloaded):
        await sender.task
    assert not sender.is_read.is_set()


@pytest.mark.parametrize(
    ("headers", "most"),
    [
        ({b"content-length": b"500"}, 500),
        ({b"content-length": b"500", b"content-encoding": b"gzip"}, FREE_BYTES),
        ({b"content-length": b"20000", b"content-encoding": b"zstd"}, 20_000 * MAX_RATIO),
        ({b"content-length": b"1000000", b"content-encoding": b"zstd"}, 8 * FREE_BYTES),
        ({b"content-encoding": b"gzip"}, 8 * FREE_BYTES),
        ({}, 8 * FREE_BYTES),
    ],
)
def test_the_decoded_size_is_reserved(headers: dict[bytes, bytes], most: int) -> None:
    reader = BodyReader(LimitSettings(max_body_bytes=8 * FREE_BYTES), LIMIT_S)
    assert reader._most(headers) == most
