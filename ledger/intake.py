"""From a stream into SQL: a message is acknowledged after its items are committed.

Used for webhook events and payloads; usage has a separate writer (ledger.writer). While SQL is down, messages
wait in their stream. A redelivered message changes nothing: existing rows are not written again.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Final, Generic, TypeVar

from msgspec import Struct

from db.apart import write_apart
from db.engine import DatabaseUnavailable
from db.set_aside import Kind, SetAside
from protocol.errors import BusError, NewerVersion, ProtocolError
from protocol.nats import pull
from protocol.nats.bus import Bus
from protocol.nats.pull import Delivery, PullConsumer
from protocol.nats.topology import consumer_exists
from protocol.process import backoff_s, wait_for

IDLE_WAIT_S: Final = 0.5
CONSUMER_POLL_S: Final = 0.5
NEWER_DELAY_S: Final = 30.0  # wait before a message of a newer release is redelivered

_Item = TypeVar("_Item")

log = logging.getLogger(__name__)


class Source(Struct, Generic[_Item], frozen=True):
    """A stream's consumer, with the functions that decode its messages and write their items."""

    kind: Kind  # of an item that is set aside
    stream: str
    consumer: str
    pull_messages: int  # per pull
    write_messages: int  # maximum per transaction
    # Returns a message's items, and why others cannot be decoded. Raises ProtocolError for an invalid message.
    read: Callable[[bytes], tuple[list[_Item], list[str]]]
    write: Callable[[Sequence[_Item]], Awaitable[None]]  # atomic (db.apart)
    name_and_owner: Callable[[_Item], tuple[str, str]]  # as they are set aside


class Intake(Generic[_Item]):
    """Consumes a source's messages until stopped."""

    def __init__(self, bus: Bus, source: Source[_Item], set_aside: SetAside, stopping: asyncio.Event) -> None:
        self._bus = bus
        self._source = source
        self._set_aside = set_aside
        self._stopping = stopping
        self._held: asyncio.Queue[Delivery] = asyncio.Queue()  # bounded by the size of a pull
        self._consumer = PullConsumer(bus, source.stream, source.consumer, self._held.put)

    async def run(self) -> None:
        """Pull, write and acknowledge until ``stopping`` is set; then hand back unwritten messages."""
        await wait_for_consumer(self._bus, self._source.stream, self._source.consumer, self._stopping)
        await self._consumer.start()
        self._bus.on_reconnect(self._on_reconnected)
        try:
            while not self._stopping.is_set():
                await self._pull()
                await self._write_next()
                await self._set_aside.flush()
        finally:
            await self._consumer.stop()
            while not self._held.empty():
                await self._answer(self._held.get_nowait(), pull.nak)

    async def _on_reconnected(self) -> None:
        self._consumer.forget_pulls()

    async def _pull(self) -> None:
        if self._held.empty() and not self._consumer.outstanding():
            try:
                await self._consumer.pull(self._source.pull_messages)
            except BusError as error:
                log.warning("cannot pull from %s, will retry: %s", self._source.stream, error)

    async def _write_next(self) -> None:
        """Wait for a message, and write it with the messages that have arrived, up to the size of a transaction."""
        try:
            async with asyncio.timeout(IDLE_WAIT_S):
                deliveries = [await self._held.get()]
        except TimeoutError:
            return
        while len(deliveries) < self._source.write_messages and not self._held.empty():
            deliveries.append(self._held.get_nowait())
        items: list[_Item] = []
        read: list[Delivery] = []
        for delivery in deliveries:
            found = await self._read(delivery)
            if found is not None:
                items += found
                read.append(delivery)
        answer = pull.ack if await self._is_written(items) else pull.nak
        for delivery in read:
            await self._answer(delivery, answer)

    async def _read(self, delivery: Delivery) -> list[_Item] | None:
        """Return the items of a message; None: it cannot be decoded and has been answered."""
        name = f"message {delivery.stream_sequence}"
        try:
            items, reasons = self._source.read(delivery.payload)
        except NewerVersion as error:
            log.warning("%s of %s will be retried: %s", name, self._source.stream, error)
            await self._answer(delivery, _nak_with_delay)
        except ProtocolError as error:
            self._lose(name, "", str(error))
            await self._answer(delivery, pull.term)
        else:
            for reason in reasons:
                self._lose(name, "", reason)
            return items
        return None

    async def _is_written(self, items: list[_Item]) -> bool:
        """Commit the items, retrying while SQL is down; False once stopping."""
        for tries, wait_s in enumerate(backoff_s()):
            try:
                await write_apart(items, self._source.write, self._lose_item)
            except DatabaseUnavailable as error:
                if not tries:
                    log.error("cannot write %ss, they stay in their stream: %s", self._source.kind, error)  # noqa: TRY400
                if await wait_for(self._stopping, wait_s):
                    return False
            else:
                return True
        return False

    def _lose_item(self, item: _Item, reason: str) -> None:
        self._lose(*self._source.name_and_owner(item), reason)

    def _lose(self, name: str, owner: str, reason: str) -> None:
        log.error("cannot store the %s %s, it is set aside: %s", self._source.kind, name, reason)
        self._set_aside.note(self._source.kind, name, owner, reason)

    async def _answer(self, delivery: Delivery, answer: Callable[[Bus, Delivery], Awaitable[None]]) -> None:
        try:
            await answer(self._bus, delivery)
        except BusError as error:
            log.warning("message %d will be redelivered: %s", delivery.stream_sequence, error)


async def _nak_with_delay(bus: Bus, delivery: Delivery) -> None:
    """Leave a message to a process that understands it; its stream keeps it for some days."""
    await pull.nak(bus, delivery, NEWER_DELAY_S)


async def wait_for_consumer(bus: Bus, stream: str, consumer: str, stopping: asyncio.Event) -> None:
    """Wait until a gateway has created the consumer, or until stopping."""
    waits = 0
    while not stopping.is_set():
        try:
            if await consumer_exists(bus, stream, consumer):
                return
            reason = "no gateway has created it yet"
        except BusError as error:
            reason = str(error)
        waits += 1
        if waits == 1:
            log.warning("waiting for the consumer %s: %s", consumer, reason)
        await wait_for(stopping, CONSUMER_POLL_S)
