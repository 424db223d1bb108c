"""The embedded queue server's disk is full for a moment: it stores again by itself, and has lost nothing."""

import asyncio
import resource
from pathlib import Path

import pytest

from benchmarks.ports import free_port
from protocol import subjects, topology
from protocol.bus import Bus
from protocol.errors import BusTimeout
from spillway.embedded_nats import EmbeddedNats
from tests.waiting import HANGS_S

UNLIMITED = resource.RLIM_INFINITY


FAILS_S = 0.5  # so long a store that must fail is waited for


async def store(bus: Bus, message_id: str, limit_s: float = HANGS_S) -> int:
    return await bus.publish_durable(subjects.REQUEST_USAGE_SUBJECT, b"x", message_id=message_id, timeout_s=limit_s)


async def test_a_store_that_is_broken_is_mended_once_there_is_room(tmp_path: Path) -> None:
    server = EmbeddedNats(tmp_path, free_port(), health_period_s=0.05, min_uptime_s=0.0, min_free_bytes=1 << 62)
    await server.start()
    bus = await Bus.connect(server.url, name="test")
    try:
        await topology.apply(bus, [], topology.QueueBounds(), limit_s=HANGS_S)
        await store(bus, "before")
        resource.prlimit(server.pid, resource.RLIMIT_FSIZE, (1, UNLIMITED))  # no file may grow
        with pytest.raises(BusTimeout):
            await store(bus, "meanwhile", FAILS_S)
        waiting = asyncio.create_task(server.wait())
        resource.prlimit(server.pid, resource.RLIMIT_FSIZE, (UNLIMITED, UNLIMITED))
        with pytest.raises(BusTimeout):
            await store(bus, "later", FAILS_S)  # why it has to be ended at all
        assert not waiting.done()  # nor would it help while there is no room
        server.min_free_bytes = 1
        async with asyncio.timeout(HANGS_S):
            await waiting
            await server.start()
            while not bus.connected:  # the client's own business
                await asyncio.sleep(0.01)
        await store(bus, "after")
        assert (await bus.api(f"STREAM.INFO.{subjects.USAGE_STREAM}"))["state"]["messages"] == 2
    finally:
        await bus.close()
        await server.stop()
