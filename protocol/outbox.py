"""Usage records on their way into the USAGE stream: kept in memory until the queue server has stored them.

    put ──> waiting ──LINGER_S or MESSAGE_RECORDS──> in flight (at most WINDOW messages) ──> stored
                                                        └──not stored: again, after a wait──┘

Each stored message costs the server an fsync, so records share one. The server drops a second message with the same
id, so one whose answer got lost is simply published again. The caller stops taking new work while the outbox is
``full``; what is already under way may still be put.
"""

import asyncio
import contextlib
import logging
import time
from collections import deque
from typing import Final

from protocol.backoff import backoff_s, wait_for
from protocol.bus import Bus
from protocol.errors import BusError, PayloadTooLarge
from protocol.usage import encode_usage

WINDOW: Final = 16  # messages in flight
LINGER_S: Final = 0.02  # how long a record waits for others to share its message; a crash loses what has waited so long
MESSAGE_RECORDS: Final = 64
MESSAGE_BYTES: Final = 256 * 1024

log = logging.getLogger(__name__)


class Outbox:
    """Publishes records to one subject, each until it is stored. ``run`` must be running for anything to leave."""

    def __init__(self, bus: Bus, subject: str, capacity: int) -> None:
        """Make an empty outbox that calls itself full from ``capacity`` records on."""
        self._bus = bus
        self._subject = subject
        self._capacity = capacity
        self._waiting: deque[tuple[str, bytes]] = deque()
        self._in_flight = 0  # records
        self._window = asyncio.Semaphore(WINDOW)
        self._has_waiting = asyncio.Event()
        self._in_a_hurry = asyncio.Event()  # a full message waits, or somebody flushes
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

    def put(self, record_id: str, payload: bytes) -> None:
        """Add an encoded record. Never refuses: whoever's work has ended must be able to say so, even while full."""
        self._waiting.append((record_id, payload))
        self._has_waiting.set()
        if len(self._waiting) >= MESSAGE_RECORDS:
            self._in_a_hurry.set()
        self._is_empty.clear()

    async def run(self) -> None:
        """Publish for ever; cancel it to stop."""
        async with asyncio.TaskGroup() as group:
            while True:
                await self._has_waiting.wait()
                await wait_for(self._in_a_hurry, LINGER_S)
                await self._window.acquire()
                group.create_task(self._publish(self._take()), name=f"outbox-{self._subject}")

    async def flush(self, timeout_s: float) -> int:
        """Wait until everything is stored, at most ``timeout_s``; return how many records are not."""
        self._in_a_hurry.set()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._is_empty.wait()
        if len(self):
            log.error("%d records for %s were not stored within %g s", len(self), self._subject, timeout_s)
        return len(self)

    def _take(self) -> list[tuple[str, bytes]]:
        """The records of the next message: at least one, however large."""
        records = [self._waiting.popleft()]
        room_bytes = MESSAGE_BYTES - len(records[0][1])
        while self._waiting and len(records) < MESSAGE_RECORDS and len(self._waiting[0][1]) <= room_bytes:
            records.append(self._waiting.popleft())
            room_bytes -= len(records[-1][1])
        self._in_flight += len(records)
        if not self._waiting:
            self._has_waiting.clear()
        if len(self._waiting) < MESSAGE_RECORDS:
            self._in_a_hurry.clear()
        return records

    async def _publish(self, records: list[tuple[str, bytes]]) -> None:
        """Publish one message until it is stored."""
        try:
            # The same records with every try, so the first one's id and their number are the message's own.
            message_id = f"{records[0][0]}+{len(records) - 1}"
            await self._publish_until_stored(message_id, encode_usage([payload for _, payload in records]))
        finally:
            self._window.release()
            self._in_flight -= len(records)
            if not len(self):
                self._is_empty.set()

    async def _publish_until_stored(self, message_id: str, payload: bytes) -> None:
        for wait_s in backoff_s():
            try:
                await self._bus.publish_durable(self._subject, payload, message_id=message_id)
            except PayloadTooLarge as error:
                log.error("usage %s for %s is lost: %s", message_id, self._subject, error)  # noqa: TRY400
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
