"""The health check of the queue server's container: it ends a server that can store nothing more, and no other."""

import asyncio
import resource
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from benchmarks.ports import free_port
from protocol import subjects
from protocol.errors import BusTimeout
from protocol.nats import topology
from protocol.nats.bus import Bus
from tests.nats_server import NatsServer
from tests.shipped import check_nats_health
from tests.waiting import HANGS_S

UNLIMITED = resource.RLIM_INFINITY
pytestmark = pytest.mark.servers


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[tuple[NatsServer, int]]:
    monitor_port = free_port()
    server = NatsServer(tmp_path, f'http: "127.0.0.1:{monitor_port}"\n')
    server.start()
    yield server, monitor_port
    server.kill()


async def test_a_server_that_can_store_nothing_more_is_ended(server: tuple[NatsServer, int]) -> None:
    nats, port = server
    assert check_nats_health(nats, port) == (0, "")
    bus = await Bus.connect(nats.url, name="test")
    await topology.apply(bus, [], topology.QueueBounds(), limit_s=HANGS_S)
    resource.prlimit(nats.pid, resource.RLIMIT_FSIZE, (1, UNLIMITED))
    with pytest.raises(BusTimeout):
        await bus.publish_durable(subjects.REQUEST_USAGE_SUBJECT, b"x", message_id="m", timeout_s=0.5)
    await bus.close()
    code, said = check_nats_health(nats, port)
    assert code == 1
    assert said.endswith("restarting\n")
    async with asyncio.timeout(HANGS_S):
        while not nats.has_ended:  # another process
            await asyncio.sleep(0.01)


async def test_a_server_that_does_not_answer_is_only_reported(server: tuple[NatsServer, int]) -> None:
    nats, _ = server
    assert check_nats_health(nats, free_port()) == (1, "")
    assert not nats.has_ended
