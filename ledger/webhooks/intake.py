"""Events from their stream into deliveries in SQL. A message is acknowledged once its deliveries are committed."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Final

from db.apart import write_apart
from db.engine import DatabaseUnavailable
from db.set_aside import SetAside
from ledger.webhooks.deliveries import Deliveries
from ledger.webhooks.events import Event, decode_event
from protocol import subjects
from protocol.errors import BusError, NewerVersion, ProtocolError
from protocol.nats import pull
from protocol.nats.bus import Bus
from protocol.nats.pull import Delivery as Message
from protocol.nats.pull import PullConsumer
from protocol.nats.topology import consumer_exists
from protocol.process import backoff_s, wait_for

PULL_MESSAGES: Final = 100  # in one pull, and so in one transaction
IDLE_WAIT_S: Final = 0.5
CONSUMER_POLL_S: Final = 2.0
NEWER_DELAY_S: Final = 30.0  # until an event of a newer release is delivered again

log = logging.getLogger(__name__)


class Intake:
    """Takes events until stopped."""

    def __init__(
        self, bus: Bus, deliveries: Deliveries, set_aside: SetAside, added: asyncio.Event, stopping: asyncio.Event
    ) -> None:
        """``added`` is set whenever there are new deliveries."""
        self._bus = bus
        self._deliveries = deliveries
        self._set_aside = set_aside
        self._added = added
        self._stopping = stopping
        self._held: asyncio.Queue[Message] = asyncio.Queue()  # bounded by what is pulled
        self._consumer = PullConsumer(bus, subjects.WEBHOOKS_STREAM, subjects.WEBHOOKS_CONSUMER, self._held.put)

    async def run(self) -> None:
        """Pull, write and acknowledge until ``stopping`` is set."""
        await self._wait_for_consumer()
        await self._consumer.start()
        self._bus.on_reconnect(self._on_reconnected)
        try:
            while not self._stopping.is_set():
                await self._pull()
                await self._take()
                await self._set_aside.flush()
        finally:
            await self._consumer.stop()
            while not self._held.empty():
                await self._answer(self._held.get_nowait(), pull.nak)

    async def _wait_for_consumer(self) -> None:
        while not self._stopping.is_set():
            try:
                if await consumer_exists(self._bus, subjects.WEBHOOKS_STREAM, subjects.WEBHOOKS_CONSUMER):
                    return
            except BusError as error:
                log.debug("cannot check for the webhooks' consumer: %s", error)
            await wait_for(self._stopping, CONSUMER_POLL_S)

    async def _on_reconnected(self) -> None:
        self._consumer.forget_pulls()

    async def _pull(self) -> None:
        if self._held.empty() and not self._consumer.outstanding():
            try:
                await self._consumer.pull(PULL_MESSAGES)
            except BusError as error:
                log.warning("cannot pull webhook events, will retry: %s", error)

    async def _take(self) -> None:
        """Wait for a message, and write it with all that have come."""
        try:
            async with asyncio.timeout(IDLE_WAIT_S):
                messages = [await self._held.get()]
        except TimeoutError:
            return
        while not self._held.empty():
            messages.append(self._held.get_nowait())
        read: list[tuple[Message, Event]] = []
        for message in messages:
            event = await self._decoded(message)
            if event is not None:
                read.append((message, event))
        answer = pull.ack if await self._written([event for _, event in read]) else pull.nak
        for message, _ in read:
            await self._answer(message, answer)

    async def _decoded(self, message: Message) -> Event | None:
        """Return the event of a message; None: it is answered, because it cannot be read."""
        try:
            return decode_event(message.payload)
        except NewerVersion as error:
            log.warning("message %d of the webhooks' stream waits: %s", message.stream_sequence, error)
            await self._answer(message, _nak_with_delay)
        except ProtocolError as error:
            self._lose(f"message {message.stream_sequence}", str(error))
            await self._answer(message, pull.term)
        return None

    async def _written(self, events: list[Event]) -> bool:
        """Commit the deliveries of events, retrying while SQL is down; False once stopping."""
        for tries, wait_s in enumerate(backoff_s()):
            try:
                await write_apart(events, self._add, self._lose_event)
            except DatabaseUnavailable as error:
                if not tries:
                    log.error("cannot write webhook events, they wait in their stream: %s", error)  # noqa: TRY400
                if await wait_for(self._stopping, wait_s):
                    return False
            else:
                return True
        return False

    def _lose_event(self, event: Event, reason: str) -> None:
        self._lose(f"{event.type} {event.id}", reason, event.team_id)

    def _lose(self, what: str, reason: str, team_id: str = "") -> None:
        log.error("the webhook event %s is lost: %s", what, reason)
        self._set_aside.note("webhook event", what, team_id, reason)

    async def _add(self, events: Sequence[Event]) -> None:
        if await self._deliveries.add(events):
            self._added.set()

    async def _answer(self, message: Message, answer: Callable[[Bus, Message], Awaitable[None]]) -> None:
        try:
            await answer(self._bus, message)
        except BusError as error:
            log.warning("message %d will be delivered again: %s", message.stream_sequence, error)


async def _nak_with_delay(bus: Bus, message: Message) -> None:
    """Leave a message to a process that understands it; its stream keeps it for some days."""
    await pull.nak(bus, message, NEWER_DELAY_S)
