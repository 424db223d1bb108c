"""A queue server with accounts and credentials, as ``spillway nats credentials`` makes them."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from protocol import subjects, topology
from protocol.bus import API, Bus
from protocol.credentials import access_options
from protocol.permissions import PARTS, WORKERS_API, worker_role
from spillway.nats_accounts import Authority, Pool, of_pool
from tests.nats_server import NatsServer
from tests.waiting import HANGS_S

MODEL = "scripted/test.v1"
OTHER_MODEL = "other/model"
POOLS = {
    "demo": Pool(models=(MODEL,), lanes=subjects.LANES),
    "other": Pool(models=(OTHER_MODEL,), lanes=subjects.LANES),
}


class Queue:
    """The server, and the authority over its users."""

    def __init__(self, server: NatsServer, folder: Path) -> None:
        self.server = server
        self.folder = folder
        self.authority = Authority.open(folder)
        for part in (*PARTS, *map(of_pool, POOLS)):
            self.authority.issue(part)
        self._opened: list[Bus] = []

    def configure(self) -> None:
        """Write what the server must know; it reads that when it starts, and when it is told to."""
        self.server.accounts = self.authority.write_server_config(POOLS).read_text()

    def reload(self) -> None:
        self.configure()
        self.server.reload(self.server.further_config)

    async def connect(self, part: str) -> Bus:
        """Connect as a part."""
        access = access_options(self.folder / f"{part}.creds", None, part)
        return await self._opened_as(part, access, API)

    async def connect_worker(self, credentials: Path, pool: str, name: str) -> Bus:
        """Connect as the workers of these credentials do."""
        access = access_options(credentials, None, worker_role(subjects.worker_prefix(pool, name)))
        return await self._opened_as(subjects.connection_name(f"{pool}.{name}.w1"), access, WORKERS_API)

    async def _opened_as(self, name: str, options: dict[str, Any], api_prefix: str) -> Bus:
        bus = await Bus.connect(self.server.url, name=name, options=options, api_prefix=api_prefix)
        self._opened.append(bus)
        return bus

    async def close(self) -> None:
        for bus in self._opened:
            await bus.close()


@pytest.fixture
def queue_server(tmp_path: Path) -> Iterator[Queue]:
    folder = tmp_path / "nats-server"
    folder.mkdir()
    queue = Queue(NatsServer(folder), tmp_path / "credentials")
    queue.configure()
    queue.server.start()
    yield queue
    queue.server.kill()


@pytest.fixture
async def queue(queue_server: Queue) -> AsyncIterator[Queue]:
    """With all streams, made as a gateway makes them."""
    async with asyncio.timeout(HANGS_S):
        gateway = await queue_server.connect("gateway")
        await topology.apply(gateway, [MODEL, OTHER_MODEL], topology.QueueBounds())
    yield queue_server
    await queue_server.close()
