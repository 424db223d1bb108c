"""The ledger process: wait for SQL and for the stream's consumer, then write until SIGTERM."""

import asyncio
import contextlib
from collections.abc import Callable, Coroutine

from sqlalchemy.ext.asyncio import AsyncEngine

from db.engine import create_engine, wait_for_database
from db.prices import seed_prices
from ledger.intake import wait_for_consumer
from ledger.payloads import writer as payload_writer
from ledger.settings import LedgerSettings
from ledger.writer import LedgerWriter
from protocol import subjects
from protocol.nats.access import access_options
from protocol.nats.bus import Bus
from protocol.nats.clock import unix_now_ms
from protocol.process import on_stop_signals

Beside = Callable[[Bus, AsyncEngine, asyncio.Event], Coroutine[None, None, None]]


async def run(
    settings: LedgerSettings, on_ready: Callable[[bool], None] | None = None, *, beside: Beside | None = None
) -> None:
    """Write usage until SIGTERM or SIGINT, then finish the batch and return.

    ``on_ready`` is called with True when SQL, the consumer and the subscription are ready, with False while SQL takes
    no rows, and with True again. Several writers may run at the same time. ``beside`` runs in parallel, on the same
    connections, and returns soon after stopping. Raises DatabaseUrlError, SchemaMismatch, and BusError if no queue
    server answers at first.
    """
    stopping = asyncio.Event()
    async with contextlib.AsyncExitStack() as stack:
        stack.enter_context(on_stop_signals(stopping.set))
        engine = create_engine(settings.database_url)
        stack.push_async_callback(engine.dispose)
        access = access_options(settings.nats_credentials, settings.nats_ca_file, "ledger")
        bus = await Bus.connect(list(settings.nats_urls), name="spillway-ledger", options=access)
        stack.push_async_callback(bus.close)
        await wait_for_database(engine, lambda: seed_prices(engine, settings.prices, unix_now_ms()), stopping)
        await wait_for_consumer(bus, subjects.USAGE_STREAM, subjects.LEDGER_CONSUMER, stopping)
        writer = LedgerWriter(bus, engine, settings, stopping)
        if not stopping.is_set():
            async with asyncio.TaskGroup() as group:
                group.create_task(writer.run(on_ready), name="ledger writer")
                group.create_task(payload_writer.run(bus, engine, stopping), name="payload writer")
                if beside is not None:
                    group.create_task(beside(bus, engine, stopping), name="beside the ledger")
