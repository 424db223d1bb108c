"""Raw pulls from a JetStream consumer: request exactly as many messages as there is room for.

A pull without messages parks at the server until it expires. A process that freezes with parked pulls receives new
messages, which wait until ``ack_wait`` redelivers them. So pulls are short, and ``outstanding`` never exceeds the
number that the caller requested.
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
PULL_GRACE_S: Final = 1.0  # after its expiry, a pull whose end the server did not report is written off

log = logging.getLogger(__name__)


class Delivery(Struct, frozen=True):
    """One delivered message. The receiver must answer it with ``ack``, ``nak`` or ``term``."""

    payload: bytes
    subject: str
    ack_subject: str
    stream_sequence: int
    deliveries: int  # number of deliveries so far, from 1
    stored_unix_ms: int  # when the stream stored it
    pending: int  # further messages in its lane

    @classmethod
    def of(cls, message: Msg) -> Self:
        """Parse JetStream's metadata in the reply subject (nine tokens, or eleven or more with a domain)."""
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
    """Return the message for redelivery, now or after a delay."""
    await _answer(bus, delivery, b'-NAK {"delay": %d}' % int(delay_s * 1e9) if delay_s else b"-NAK")


async def term(bus: Bus, delivery: Delivery) -> None:
    """Drop the message permanently, because no consumer can use it."""
    await _answer(bus, delivery, b"+TERM")


async def _answer(bus: Bus, delivery: Delivery, answer: bytes) -> None:
    # Never buffered for a later connection: a memory stream restarts with its server, and the sequence would then refer
    # to another message. Without an answer, this message is redelivered.
    if bus.connected:
        await bus.publish(delivery.ack_subject, answer)


class _Pull(Struct):
    remaining: int
    expires_at_s: float  # monotonic clock


class PullConsumer:
    """Pulls from one durable consumer; ``handler`` receives each delivery in order.

    ``tier``: for consumers of jobs, which serve pulls of cheaper tiers first. ``on_end``: called when a pull ends at
    the server with fewer messages than requested.
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
        self.found_all = False  # whether the last pull received all available messages

    async def start(self) -> None:
        """Subscribe to the inbox for replies, without requesting messages."""
        self._subscription = await self._bus.subscribe(f"{self._inbox}.*", self._on_message)

    async def stop(self) -> None:
        """Unsubscribe, which ends parked pulls at the server. Messages already sent still reach the handler."""
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
        """Request up to ``batch`` messages, waiting at the server for at most ``expires_s``; 0: only available ones."""
        self.found_all = False
        number = str(next(self._numbers))
        self._pulls[number] = _Pull(remaining=batch, expires_at_s=time.monotonic() + expires_s)
        patience = {"expires": int(expires_s * 1e9)} if expires_s else {"no_wait": True}
        body = json.dumps({"batch": batch, **patience, **self._priority}).encode()
        await self._bus.publish(self._api_subject, body, reply=f"{self._inbox}.{number}")

    def forget_pulls(self) -> None:
        """Write off all parked pulls, because the server restarted and lost them."""
        self._pulls.clear()

    async def _on_message(self, message: Msg) -> None:
        # JetStream ends or refuses a pull with an empty message and a status header on the pull's inbox. A delivery has
        # its stream subject and does not name its pull; the server serves pulls in order.
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
        self.found_all = status in {"404", "408"}  # no messages; expired
        if not self.found_all and status != "503":  # no consumer, or one without a leader
            log.warning("pull from %s ended: %s %s", self._api_subject, status, headers.get("Description", ""))
