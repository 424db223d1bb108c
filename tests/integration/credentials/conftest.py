"""A queue server with accounts and credentials, as ``spillway nats credentials`` makes them, and who works there."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import func, select

from db.accounts.keys import Grant, create_key
from db.accounts.principal import Policy
from db.engine import create_engine
from db.tables import AttemptRow, RequestRow
from gateway.settings import GatewaySettings, ModelSettings
from ledger.settings import LedgerSettings
from ledger.writer import LedgerWriter
from pool_worker.settings import ScriptedEngineSettings, WorkerSettings
from protocol import subjects
from protocol.nats import topology
from protocol.nats.access import PARTS, WORKERS_API, access_options, worker_role
from protocol.nats.bus import API, Bus
from spillway.nats_accounts import Authority, Pool, of_pool
from tests.integration.gateway.conftest import PEPPER, QUICK, GatewayUnderTest
from tests.nats_server import NatsServer
from tests.waiting import HANGS_S, until

MODEL = "scripted/test.v1"
OTHER_MODEL = "other/model"
TRUSTED_QUEUE = subjects.queue_of(MODEL, trusted=True)
POOLS = {
    "demo": Pool(models=(MODEL,), lanes=subjects.LANES),
    "other": Pool(models=(OTHER_MODEL,), lanes=subjects.LANES),
    "vault": Pool(models=(MODEL,), lanes=subjects.LANES, trusted=True),
}
LONG_CONTEXT = 1_000_000
SLOW: dict[str, Any] = {"inter_token_s": 0.02}


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
        await topology.apply(gateway, [MODEL, TRUSTED_QUEUE, OTHER_MODEL], topology.QueueBounds(), limit_s=HANGS_S)
    yield queue_server
    await queue_server.close()


class Installation:
    """A gateway and a ledger writer in the test's own loop; workers come and go."""

    def __init__(self, queue: Queue, gateway: GatewayUnderTest, database_url: str, confidential_key: str) -> None:
        self.queue = queue
        self.confidential_key = confidential_key  # demands trusted pools
        self.gateway = gateway
        self.database_url = database_url

    def worker_settings(self, pool: str = "demo", name: str | None = None, **rest: Any) -> WorkerSettings:
        part = of_pool(pool)
        file = part if name is None else f"{part}.{name}"
        prefix = subjects.worker_prefix(pool, name or "pool")
        engine = ScriptedEngineSettings(
            max_model_len=LONG_CONTEXT, max_kv_tokens=4 * LONG_CONTEXT, **rest.pop("engine", {})
        )
        return WorkerSettings(
            worker_id=f"{prefix}.{rest.pop('instance', 'w1')}",
            pool=pool,
            nats_urls=(self.queue.server.url,),
            nats_credentials=self.queue.folder / f"{file}.creds",
            models=POOLS[pool].models,
            trusted=POOLS[pool].trusted,
            engine=engine,
            **rest,
        )

    async def ready(self) -> None:
        """Return when the gateway has the model's card."""
        client = self.gateway.client()

        async def is_ready() -> bool:
            model = await client.models.retrieve(MODEL)
            return model.model_dump()["context_length"] is not None

        await until(is_ready)

    async def complete(self, prompt: str = "hello", **rest: Any) -> str:
        answer = await self.gateway.client().completions.create(model=MODEL, prompt=prompt, **rest)
        return str(answer.choices[0].text)

    async def rows(self) -> tuple[int, int]:
        """(requests, those of them with an attempt) that are in SQL as they should be.

        How many attempts a request has is not asked: where an acknowledgement is lost with its connection, two workers
        begin the job, and the gateway stops one.
        """
        engine = create_engine(self.database_url)
        try:
            async with engine.connect() as connection:
                ok = select(func.count()).select_from(RequestRow).where(RequestRow.outcome == "ok")
                attempts = select(func.count(AttemptRow.request_id.distinct()))
                return (await connection.execute(ok)).scalar_one(), (await connection.execute(attempts)).scalar_one()
        finally:
            await engine.dispose()


@pytest.fixture
async def installation(queue_server: Queue, sqlite_url: str, tmp_path: Path) -> AsyncIterator[Installation]:
    queue = queue_server
    engine = create_engine(sqlite_url)
    _, key = await create_key(engine, "test", PEPPER)
    _, confidential = await create_key(engine, "confidential", PEPPER, Grant(policy=Policy(trusted_only=True)))
    settings = GatewaySettings.model_validate(
        {
            "gateway_id": "g1",
            "port": 0,
            "nats_urls": (queue.server.url,),
            "nats_credentials": queue.folder / "gateway.creds",
            "database_url": sqlite_url,
            "data_dir": tmp_path / "data",
            "key_pepper": PEPPER,
            "models": {MODEL: ModelSettings()},
            "trusted": {MODEL},
            "timeouts": QUICK,
        }
    )
    gateway = GatewayUnderTest(settings, key, await queue.connect("gateway"))
    await gateway.start()
    stopping = asyncio.Event()
    ledger_settings = LedgerSettings(nats_urls=(queue.server.url,), database_url=sqlite_url, batch_wait_s=0.02)
    writer = LedgerWriter(await queue.connect("ledger"), engine, ledger_settings, stopping)
    writing = asyncio.create_task(writer.run())
    yield Installation(queue, gateway, sqlite_url, confidential)
    await gateway.close_clients()
    await gateway.end()
    stopping.set()
    async with asyncio.timeout(HANGS_S):
        await writing
    await engine.dispose()
    await queue.close()
    # Nobody has tried what it may not: each part's list is complete.
    assert "Violation" not in (queue.server.folder / "nats.log").read_text()


async def has_rows(installation: Installation, requests: int, attempts: int) -> bool:
    return await installation.rows() == (requests, attempts)
