"""Usage records on their way into the USAGE stream: kept in memory until the stream has them."""

import asyncio
import logging
import random
from typing import Final

from protocol import subjects
from protocol.bus import Bus
from protocol.errors import BusError
from protocol.messages import RequestRecord, encode

PUBLISHERS: Final = 16  # records in flight at once
FIRST_RETRY_S: Final = 0.1
LAST_RETRY_S: Final = 5.0

log = logging.getLogger(__name__)


class UsageOutbox:
    """A bounded queue of records and the tasks that publish them, each for as long as it takes.

    The message id is the request's id, so a record whose acknowledgement was lost is not stored twice.
    """

    def __init__(self, bus: Bus, max_records: int) -> None:
        self._bus = bus
        self._max_records = max_records
        self._queue: asyncio.Queue[RequestRecord] = asyncio.Queue()
        self._unpublished = 0

    def __len__(self) -> int:
        return self._unpublished

    def is_full(self) -> bool:
        """Whether no further request may be admitted, as its record would find no room.

        Requests admitted before may still add theirs: an admitted request is always recorded.
        """
        return self._unpublished >= self._max_records

    def add(self, record: RequestRecord) -> None:
        """Take a record over. Never blocks."""
        self._unpublished += 1
        self._queue.put_nowait(record)

    async def run(self) -> None:
        """Publish for ever."""
        async with asyncio.TaskGroup() as group:
            for number in range(PUBLISHERS):
                group.create_task(self._publish_for_ever(), name=f"usage-publisher-{number}")

    async def flush(self, limit_s: float) -> None:
        """Wait until everything is published; what is not within ``limit_s`` is lost, and logged."""
        try:
            async with asyncio.timeout(limit_s):
                await self._queue.join()
        except TimeoutError:
            log.critical("%d usage records could not be published before the end", self._unpublished)

    async def _publish_for_ever(self) -> None:
        while True:
            record = await self._queue.get()
            await self._publish(record)
            self._unpublished -= 1
            self._queue.task_done()

    async def _publish(self, record: RequestRecord) -> None:
        payload = encode(record)
        wait_s = FIRST_RETRY_S
        while True:
            try:
                # Published while disconnected it would pile up, once per retry, in the client's own buffer.
                if self._bus.connected:
                    await self._bus.publish_durable(
                        subjects.REQUEST_USAGE_SUBJECT, payload, message_id=record.request_id
                    )
                    return
            except BusError as error:
                log.warning("usage record of %s is kept for later: %s", record.request_id, error)
            await asyncio.sleep(wait_s * random.uniform(0.5, 1.0))  # noqa: S311  # jitter
            wait_s = min(wait_s * 2, LAST_RETRY_S)
