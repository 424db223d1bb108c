"""The ledger process: wait for SQL and for the stream's consumer, then write until SIGTERM."""

import asyncio
import logging
import signal
from collections.abc import Callable
from typing import Final

from sqlalchemy.ext.asyncio import AsyncEngine

from gateway.db.engine import create_engine
from gateway.db.errors import SQL_ERRORS, DatabaseUnavailable, describe
from gateway.db.schema import check_schema
from gateway.ledger.prices import seed_prices
from gateway.ledger.writer import LedgerWriter
from gateway.payloads.writer import PayloadWriter
from gateway.settings import LedgerSettings
from protocol import subjects
from protocol.backoff import backoff_s, wait_for
from protocol.bus import Bus
from protocol.clock import unix_now_ms
from protocol.errors import BusError
from protocol.topology import consumer_exists

CONSUMER_POLL_S: Final = 0.5

log = logging.getLogger(__name__)


async def run(settings: LedgerSettings, on_ready: Callable[[], None] | None = None) -> None:
    """Write usage until SIGTERM or SIGINT, then finish the batch and return.

    ``on_ready`` is called once, when SQL, the consumer and the subscription are there. Several writers may run at
    once. Raises DatabaseUrlError, SchemaMismatch, and BusError if no queue server answers at first.
    """
    stopping = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopping.set)
    engine = create_engine(settings.database_url)
    try:
        bus = await Bus.connect(list(settings.nats_urls), name="spillway-ledger")
        try:
            await _wait_for_database(engine, stopping)
            await _enter_prices(engine, settings, stopping)
            await _wait_for_consumer(bus, stopping)
            writer = LedgerWriter(bus, engine, settings, stopping)
            payloads = PayloadWriter(bus, engine, stopping)
            if not stopping.is_set():
                async with asyncio.TaskGroup() as group:
                    group.create_task(writer.run(on_ready), name="ledger writer")
                    group.create_task(payloads.run(), name="payload writer")
        finally:
            await bus.close()
    finally:
        await engine.dispose()


async def _wait_for_database(engine: AsyncEngine, stopping: asyncio.Event) -> None:
    """Return when SQL answers and its schema fits, or when stopping. Raises SchemaMismatch."""
    failures = 0
    for wait_s in backoff_s():
        try:
            await check_schema(engine)
        except DatabaseUnavailable as error:
            failures += 1
            if failures == 1:
                log.error("waiting for the database: %s", error)  # noqa: TRY400
        else:
            return
        if await wait_for(stopping, wait_s):
            return


async def _enter_prices(engine: AsyncEngine, settings: LedgerSettings, stopping: asyncio.Event) -> None:
    """Enter the configuration's prices, or return when stopping."""
    for wait_s in backoff_s():
        try:
            await seed_prices(engine, settings.prices, unix_now_ms())
        except SQL_ERRORS as error:
            log.warning("prices could not be entered, will try again: %s", describe(error))
        else:
            return
        if await wait_for(stopping, wait_s):
            return


async def _wait_for_consumer(bus: Bus, stopping: asyncio.Event) -> None:
    """Return when a gateway has made the consumer, or when stopping."""
    waits = 0
    while not stopping.is_set():
        try:
            if await consumer_exists(bus, subjects.USAGE_STREAM, subjects.LEDGER_CONSUMER):
                return
            reason = "no gateway has made it yet"
        except BusError as error:
            reason = str(error)
        waits += 1
        if waits == 1:
            log.warning("waiting for the consumer %s: %s", subjects.LEDGER_CONSUMER, reason)
        await wait_for(stopping, CONSUMER_POLL_S)
