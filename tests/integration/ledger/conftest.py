"""A stream with its consumer, writers as processes, and what has reached SQL."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from pathlib import Path

import pytest
from sqlalchemy import func, select
from sqlalchemy.ext.asyncio import AsyncEngine

from db.engine import create_engine
from db.tables import AttemptRow, RequestRow
from ledger.settings import LedgerSettings
from protocol import subjects
from protocol.errors import BusError, BusTimeout
from protocol.job import encode
from protocol.nats import topology
from protocol.nats.bus import Bus
from protocol.usage import RequestRecord, UsageRecord, encode_usage
from tests.forks import Process
from tests.integration.ledger.writer_process import start_writer_process
from tests.waiting import HANGS_S, until

ACK_WAIT_S = 2  # a killed writer's records come again soon


class Ledger:
    """The stream that the test publishes to, and the tables."""

    def __init__(self, bus: Bus, engine: AsyncEngine) -> None:
        self.bus = bus
        self.engine = engine
        self._published = 0

    async def apply_topology(self, ack_wait_s: float = ACK_WAIT_S) -> None:
        await topology.apply(self.bus, [], topology.QueueBounds(), limit_s=HANGS_S)
        config = topology.ledger_consumer_config() | {"ack_wait": int(ack_wait_s * topology.NS)}
        call = f"CONSUMER.DURABLE.CREATE.{subjects.USAGE_STREAM}.{subjects.LEDGER_CONSUMER}"
        await self.bus.api(call, {"stream_name": subjects.USAGE_STREAM, "config": config})

    async def publish(self, records: Iterable[UsageRecord | bytes], subject: str = "") -> None:
        for record in records:
            self._published += 1
            is_request = isinstance(record, RequestRecord)
            await self._publish_until_stored(
                subject or (subjects.REQUEST_USAGE_SUBJECT if is_request else subjects.ATTEMPT_USAGE_SUBJECT),
                record if isinstance(record, bytes) else encode_usage([encode(record)]),
                message_id=f"m{self._published}",  # its own for each, so that duplicates get past the stream
            )

    async def _publish_until_stored(self, subject: str, payload: bytes, message_id: str) -> None:
        async with asyncio.timeout(HANGS_S):
            while True:
                await until(lambda: self.bus.connected)
                try:
                    await self.bus.publish_durable(subject, payload, message_id=message_id, timeout_s=1)
                except BusTimeout:  # sent just when the server went away: it or its answer was lost
                    continue
                except BusError:
                    if self.bus.connected:
                        raise
                else:
                    return

    async def counts(self) -> tuple[int, int]:
        """(requests, attempts) in SQL."""
        async with self.engine.connect() as connection:
            requests = await connection.execute(select(func.count()).select_from(RequestRow))
            attempts = await connection.execute(select(func.count()).select_from(AttemptRow))
            return requests.scalar_one(), attempts.scalar_one()

    async def unfinished(self) -> int:
        """Records that the stream still holds for the writers: waiting or unacknowledged."""
        info = await self.bus.api(f"CONSUMER.INFO.{subjects.USAGE_STREAM}.{subjects.LEDGER_CONSUMER}")
        return int(info["num_pending"]) + int(info["num_ack_pending"])

    async def has(self, requests: int, attempts: int) -> bool:
        return await self.counts() == (requests, attempts)

    async def has_at_least(self, records: int) -> bool:
        return sum(await self.counts()) >= records


@pytest.fixture
def settings(nats_url: str, database_url: str) -> LedgerSettings:
    return LedgerSettings(nats_urls=(nats_url,), database_url=database_url, batch_records=100, batch_wait_s=0.05)


@pytest.fixture
async def ledger(nats_url: str, database_url: str) -> AsyncIterator[Ledger]:
    bus = await Bus.connect(nats_url, name="test")
    engine = create_engine(database_url)
    yield Ledger(bus, engine)
    await engine.dispose()
    await bus.close()


@pytest.fixture
def start_writer(settings: LedgerSettings, tmp_path: Path) -> Iterator[Callable[[], Process]]:
    """Start a writer process of the test's settings; all are ended with the test."""
    started: list[Process] = []

    def start() -> Process:
        started.append(start_writer_process(settings, tmp_path / f"writer-{len(started)}.log"))
        return started[-1]

    yield start
    for writer in started:
        writer.kill()
