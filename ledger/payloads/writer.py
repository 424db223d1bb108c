"""The payload writer: from the PAYLOADS stream into SQL, and deleted there when they expire.

Runs beside the ledger writer. A message is acknowledged after its commit, and inserting it twice does nothing. While
SQL is down, payloads wait in the stream, which drops its oldest messages when it is full.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Final

from sqlalchemy.ext.asyncio import AsyncEngine

from db.apart import write_apart
from db.engine import SQL_ERRORS, DatabaseUnavailable, describe
from db.set_aside import SetAside
from ledger.payloads.store import DELETE_ROWS, delete_expired, store_payloads
from protocol import subjects
from protocol.errors import BusError, NewerVersion, ProtocolError
from protocol.nats import pull
from protocol.nats.bus import Bus
from protocol.nats.pull import Delivery, PullConsumer
from protocol.nats.topology import consumer_exists
from protocol.process import backoff_s, wait_for
from protocol.usage import PayloadRecord, read_payloads

PULL_MESSAGES: Final = 8  # in one pull: of at most 8 MB each, and usually far less
IDLE_WAIT_S: Final = 0.5
EXPIRY_PERIOD_S: Final = 60.0
CONSUMER_POLL_S: Final = 2.0
NEWER_DELAY_S: Final = 30.0  # until a message of a newer release is delivered again

log = logging.getLogger(__name__)


class PayloadWriter:
    """Writes until stopped."""

    def __init__(self, bus: Bus, engine: AsyncEngine, stopping: asyncio.Event) -> None:
        self._bus = bus
        self._engine = engine
        self._stopping = stopping
        self._set_aside = SetAside(engine)
        self._held: asyncio.Queue[Delivery] = asyncio.Queue()  # bounded by what is pulled
        self._checked_s = float("-inf")  # when it last deleted expired payloads; monotonic clock
        self._consumer = PullConsumer(bus, subjects.PAYLOADS_STREAM, subjects.PAYLOADS_CONSUMER, self._held.put)

    async def run(self) -> None:
        """Pull, write and acknowledge until ``stopping`` is set."""
        await self._wait_for_consumer()
        await self._consumer.start()
        self._bus.on_reconnect(self._on_reconnected)
        try:
            while not self._stopping.is_set():
                await self._pull()
                await self._write_next()
                await self._delete_expired()
                await self._set_aside.flush()
        finally:
            await self._consumer.stop()
        while not self._held.empty():
            await self._answer(self._held.get_nowait(), pull.nak)

    async def _wait_for_consumer(self) -> None:
        while not self._stopping.is_set():
            try:
                if await consumer_exists(self._bus, subjects.PAYLOADS_STREAM, subjects.PAYLOADS_CONSUMER):
                    return
            except BusError as error:
                log.debug("cannot check for the payloads' consumer: %s", error)
            await wait_for(self._stopping, CONSUMER_POLL_S)

    async def _on_reconnected(self) -> None:
        self._consumer.forget_pulls()

    async def _pull(self) -> None:
        if self._held.empty() and not self._consumer.outstanding():
            try:
                await self._consumer.pull(PULL_MESSAGES)
            except BusError as error:
                log.warning("cannot pull payloads, will retry: %s", error)

    async def _write_next(self) -> None:
        try:
            async with asyncio.timeout(IDLE_WAIT_S):
                delivery = await self._held.get()
        except TimeoutError:
            return
        try:
            records, reasons = read_payloads(delivery.payload)
            for reason in reasons:
                self._lose(f"message {delivery.stream_sequence}", reason)
            is_stored = await self._stored(records)
        except NewerVersion as error:
            log.warning("message %d of the payloads' stream waits: %s", delivery.stream_sequence, error)
            await self._answer(delivery, _nak_with_delay)
        except ProtocolError as error:
            self._lose(f"message {delivery.stream_sequence}", str(error))
            await self._answer(delivery, pull.term)
        else:
            await self._answer(delivery, pull.ack if is_stored else pull.nak)

    async def _stored(self, records: list[PayloadRecord]) -> bool:
        """Insert the records, retrying while SQL is down; False once stopping."""
        for tries, wait_s in enumerate(backoff_s()):
            try:
                await write_apart(records, partial(store_payloads, self._engine), self._lose_record)
            except DatabaseUnavailable as error:
                if not tries:
                    log.error("cannot write payloads, they wait in their stream: %s", error)  # noqa: TRY400
                if await wait_for(self._stopping, wait_s):
                    return False
            else:
                return True
        return False

    def _lose_record(self, record: PayloadRecord, reason: str) -> None:
        self._lose(record.request_id, reason, record.key_id)

    def _lose(self, what: str, reason: str, key_id: str = "") -> None:
        log.error("the payload of %s is lost: %s", what, reason)
        self._set_aside.note("payload", what, key_id, reason)

    async def _delete_expired(self) -> None:
        """Delete expired payloads, every minute, and again without a pause while there are more."""
        if time.monotonic() - self._checked_s < EXPIRY_PERIOD_S:
            return
        try:
            deleted = await delete_expired(self._engine)
        except SQL_ERRORS as error:
            log.warning("cannot delete expired payloads, will retry: %s", describe(error))
            deleted = 0
        if deleted < DELETE_ROWS:
            self._checked_s = time.monotonic()

    async def _answer(self, delivery: Delivery, answer: Callable[[Bus, Delivery], Awaitable[None]]) -> None:
        try:
            await answer(self._bus, delivery)
        except BusError as error:
            log.warning("message %d will be delivered again: %s", delivery.stream_sequence, error)


async def _nak_with_delay(bus: Bus, delivery: Delivery) -> None:
    """Leave a message to a writer that understands it; its stream keeps it for some days."""
    await pull.nak(bus, delivery, NEWER_DELAY_S)
