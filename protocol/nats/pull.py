"""Raw pulls from a JetStream consumer: ask for exactly as many messages as there is room for, never more.

A pull that nobody answers parks at the server until it expires; a process that freezes with parked pulls swallows the
messages that then arrive, until ``ack_wait`` hands them back. So pulls are short, and ``outstanding`` never exceeds
what the caller asked for.
"""

import itertools
import json
import logging
import time
from collections.abc import Awaitable, Callable
from typing import Final, Self

from msgspec import Struct
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription
from nats.errors import Error as NatsError

from protocol.nats.bus import Bus
from protocol.nats.topology import PULL_PRIORITIES, TIER_GROUP

PULL_EXPIRES_S: Final = 2.0
PULL_GRACE_S: Final = 1.0  # past its expiry, a pull whose end the server never reported is written off

log = logging.getLogger(__name__)


class Delivery(Struct, frozen=True):
    """One message taken from a stream; the taker owes it an ``ack``, ``nak`` or ``term``."""

    payload: bytes
    subject: str
    ack_subject: str
    stream_sequence: int
    deliveries: int  # 1 the first time
    stored_unix_ms: int  # when the stream took it
    pending: int  # how many more wait in its lane

    @classmethod
    def of(cls, message: Msg) -> Self:
        """Read the facts that JetStream keeps in the reply subject (nine tokens, or eleven and more with a domain)."""
        tokens = message.reply.split(".")
        at = 2 if len(tokens) == 9 else 4
        return cls(
            payload=message.data,
            subject=message.subject,
            ack_subject=message.reply,
            deliveries=int(tokens[at + 2]),
            stream_sequence=int(tokens[at + 3]),
            stored_unix_ms=int(tokens[at + 5]) // 1_000_000,
            pending=int(tokens[at + 6]),
        )


async def ack(bus: Bus, delivery: Delivery) -> None:
    """Remove the message from the work queue."""
    await _answer(bus, delivery, b"+ACK")


async def nak(bus: Bus, delivery: Delivery, delay_s: float = 0.0) -> None:
    """Hand the message back for another consumer, now or after a while."""
    await _answer(bus, delivery, b'-NAK {"delay": %d}' % int(delay_s * 1e9) if delay_s else b"-NAK")


async def term(bus: Bus, delivery: Delivery) -> None:
    """Drop the message permanently: it is of no use to any consumer."""
    await _answer(bus, delivery, b"+TERM")


async def _answer(bus: Bus, delivery: Delivery, answer: bytes) -> None:
    # Never kept for a later connection: a memory stream begins again with its server, and the number would then mean
    # somebody else's message. Unanswered, this one comes again.
    if bus.connected:
        await bus.publish(delivery.ack_subject, answer)


class _Pull(Struct):
    remaining: int
    expires_at_s: float  # monotonic clock


class PullConsumer:
    """Pulls from one durable consumer; ``handler`` gets each delivery, in order.

    ``tier`` is for consumers of jobs, which serve the pulls of cheaper tiers first; ``on_end`` is called when a pull
    has ended at the server without having brought all that it asked for.
    """

    def __init__(
        self,
        bus: Bus,
        stream: str,
        consumer: str,
        handler: Callable[[Delivery], Awaitable[None]],
        *,
        tier: str | None = None,
        on_end: Callable[[], None] | None = None,
    ) -> None:
        self._bus = bus
        self._api_subject = f"{bus.api_prefix}.CONSUMER.MSG.NEXT.{stream}.{consumer}"
        self._handler = handler
        self._priority = {} if tier is None else {"group": TIER_GROUP, "priority": PULL_PRIORITIES[tier]}
        self._on_end = on_end
        self._inbox = bus.client.new_inbox()
        self._pulls: dict[str, _Pull] = {}
        self._numbers = itertools.count(1)
        self._subscription: Subscription | None = None
        self.found_all = False  # whether the last pull has been given all that there was

    async def start(self) -> None:
        """Subscribe to the inbox that answers come to. No message is asked for yet."""
        self._subscription = await self._bus.subscribe(f"{self._inbox}.*", self._on_message)

    async def stop(self) -> None:
        """Stop listening: parked pulls end at the server, and what it had sent by then still reaches the handler."""
        if self._subscription is not None and not self._bus.client.is_closed:
            try:
                if self._bus.connected:
                    await self._subscription.drain()  # type: ignore[no-untyped-call]
                else:
                    await self._subscription.unsubscribe()
            except NatsError as error:
                log.warning("%s was not drained: %s", self._api_subject, str(error) or type(error).__name__)
        self._pulls.clear()

    def outstanding(self) -> int:
        """Return the number of messages that have been requested and may still arrive."""
        if not self._pulls:
            return 0
        long_ago_s = time.monotonic() - PULL_GRACE_S
        outstanding, expired = 0, []
        for number, pull in self._pulls.items():
            if pull.expires_at_s < long_ago_s:
                expired.append(number)
            else:
                outstanding += pull.remaining
        for number in expired:
            del self._pulls[number]
        return outstanding

    async def pull(self, batch: int, *, expires_s: float = PULL_EXPIRES_S) -> None:
        """Ask for up to ``batch`` messages, waiting at the server for at most ``expires_s``; 0: take what is there."""
        self.found_all = False
        number = str(next(self._numbers))
        self._pulls[number] = _Pull(remaining=batch, expires_at_s=time.monotonic() + expires_s)
        patience = {"expires": int(expires_s * 1e9)} if expires_s else {"no_wait": True}
        body = json.dumps({"batch": batch, **patience, **self._priority}).encode()
        await self._bus.publish(self._api_subject, body, reply=f"{self._inbox}.{number}")

    def forget_pulls(self) -> None:
        """Write off all parked pulls: the server has restarted and does not know them."""
        self._pulls.clear()

    async def _on_message(self, message: Msg) -> None:
        # JetStream ends or refuses a pull by an empty message, with a status header, on the pull's own inbox. A
        # delivery keeps its stream subject and does not say which pull it answers; the server serves them in order.
        if not message.reply:
            self._pulls.pop(message.subject.rpartition(".")[2], None)
            self._note_status(message)
            if self._on_end is not None:
                self._on_end()
            return
        self._count_delivery()
        await self._handler(Delivery.of(message))

    def _count_delivery(self) -> None:
        oldest = next(iter(self._pulls), None)
        if oldest is None:
            return
        self._pulls[oldest].remaining -= 1
        if self._pulls[oldest].remaining <= 0:
            del self._pulls[oldest]

    def _note_status(self, message: Msg) -> None:
        headers = message.headers or {}
        status = headers.get("Status", "")
        self.found_all = status in {"404", "408"}  # nothing there; expired
        if not self.found_all and status != "503":  # no consumer, or one without a leader
            log.warning("pull from %s ended: %s %s", self._api_subject, status, headers.get("Description", ""))
