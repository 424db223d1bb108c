"""Records on their way into a stream: kept in memory until the queue server has stored them.

    put ──> waiting ──> in flight (at most WINDOW) ──> stored
                 └───── not stored: again, after a wait ────┘

The server drops a second message with the same id, so a record whose answer got lost is simply published again. The
caller stops taking new work while the outbox is ``full``; what is already under way may still be put.
"""

import asyncio
import contextlib
import logging
import time
from collections import deque
from typing import Final

from protocol.backoff import backoff_s
from protocol.bus import Bus
from protocol.errors import BusError, PayloadTooLarge

WINDOW: Final = 16  # publishes in flight

log = logging.getLogger(__name__)


class Outbox:
    """Publishes records to one subject, each until it is stored. ``run`` must be running for anything to leave."""

    def __init__(self, bus: Bus, subject: str, capacity: int) -> None:
        """Make an empty outbox that calls itself full from ``capacity`` records on."""
        self._bus = bus
        self._subject = subject
        self._capacity = capacity
        self._waiting: deque[tuple[str, bytes]] = deque()
        self._in_flight = 0
        self._has_waiting = asyncio.Event()
        self._is_empty = asyncio.Event()
        self._is_empty.set()
        self._failing_since_s: float | None = None  # monotonic clock; None: the last publish was stored

    def __len__(self) -> int:
        """How many records are not known to be stored."""
        return len(self._waiting) + self._in_flight

    @property
    def full(self) -> bool:
        """Whether the caller should take no new work for now."""
        return len(self) >= self._capacity

    def put(self, message_id: str, payload: bytes) -> None:
        """Add a record. Never refuses: a caller whose work has ended must be able to say so, even while full."""
        self._waiting.append((message_id, payload))
        self._has_waiting.set()
        self._is_empty.clear()

    async def run(self) -> None:
        """Publish for ever; cancel it to stop."""
        async with asyncio.TaskGroup() as group:
            for number in range(WINDOW):
                group.create_task(self._publish_in_turn(), name=f"outbox-{self._subject}-{number}")

    async def flush(self, timeout_s: float) -> int:
        """Wait until everything is stored, at most ``timeout_s``; return how many records are not."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._is_empty.wait()
        if len(self):
            log.error("%d records for %s were not stored within %g s", len(self), self._subject, timeout_s)
        return len(self)

    async def _publish_in_turn(self) -> None:
        while True:
            while not self._waiting:
                self._has_waiting.clear()
                await self._has_waiting.wait()
            message_id, payload = self._waiting.popleft()
            self._in_flight += 1
            await self._publish(message_id, payload)
            self._in_flight -= 1
            if not len(self):
                self._is_empty.set()

    async def _publish(self, message_id: str, payload: bytes) -> None:
        """Publish one record until it is stored."""
        for wait_s in backoff_s():
            try:
                await self._bus.publish_durable(self._subject, payload, message_id=message_id)
            except PayloadTooLarge as error:
                log.error("record %s for %s is lost: %s", message_id, self._subject, error)  # noqa: TRY400
                return
            except BusError as error:
                self._note_failure(error)
            else:
                self._note_success()
                return
            await asyncio.sleep(wait_s)

    def _note_failure(self, error: BusError) -> None:
        if self._failing_since_s is None:
            self._failing_since_s = time.monotonic()
            log.warning("records for %s are not stored, trying again: %s", self._subject, error)

    def _note_success(self) -> None:
        if self._failing_since_s is not None:
            failing_s = time.monotonic() - self._failing_since_s
            log.warning("records for %s are stored again, after %.1f s", self._subject, failing_s)
            self._failing_since_s = None
