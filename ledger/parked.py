"""Parking usage records that this build cannot store, and replaying them once a build can.

During an upgrade, a record of a newer release can reach an older writer. A damaged record, or one that the
database rejects, comes from a broken worker. Only that record is parked; its neighbors are written. A writer that
can decode a parked record replays it automatically, at its start and once a minute. Records that the database has
rejected wait for ``spillway parked --replay``.
"""

import base64
import logging
import time
from collections.abc import AsyncIterator, Iterable
from typing import Final

from protocol import subjects
from protocol.errors import STREAM_NOT_FOUND, ApiError, BusError, ProtocolError
from protocol.job import PROTOCOL_VERSION, encode
from protocol.nats.bus import Bus
from protocol.nats.clock import unix_now_ms
from protocol.nats.pull import Delivery
from protocol.usage import MAX_MESSAGE_BYTES, MAX_REASON_CHARS, ParkedUsage, UnreadUsage, decode_parked, read_usage

REPLAY_PERIOD_S: Final = 60.0
REPLAY_RECORDS: Final = 1000  # checked in one period

log = logging.getLogger(__name__)


async def park(bus: Bus, delivery: Delivery, unread: Iterable[UnreadUsage], *, is_refused: bool = False) -> None:
    """Park records of a message of USAGE. Raises BusError if some may not be parked."""
    # The id is the same after a redelivery (lost acknowledgment), so the record is parked only once.
    message_id = f"{delivery.stream_sequence}.{delivery.stored_unix_ms}.{'refused' if is_refused else 'unread'}"
    for number, record in enumerate(unread):
        message, reason = record.message, record.reason[:MAX_REASON_CHARS]
        if (
            len(message) > MAX_MESSAGE_BYTES
        ):  # only an attacker sends such a record, and the whole of it might never fit
            reason += f"; truncated to {MAX_MESSAGE_BYTES} of {len(message)} bytes"
            message = message[:MAX_MESSAGE_BYTES]
        parked = ParkedUsage(PROTOCOL_VERSION, message, reason, unix_now_ms(), is_refused, delivery.subject)
        await bus.publish_durable(subjects.PARKED_USAGE_SUBJECT, encode(parked), message_id=f"{message_id}.{number}")
        log.error(
            "parked a usage record of message %d (see `spillway parked`): %s",
            delivery.stream_sequence,
            reason,
        )


async def parked_records(bus: Bus, after_sequence: int = 0) -> AsyncIterator[tuple[int, ParkedUsage]]:
    """Yield the parked records, oldest first, with their sequence in PARKED; skip unreadable ones. Raises BusError."""
    sequence = after_sequence
    while True:
        query: dict[str, int | str] = {"seq": sequence + 1, "next_by_subj": subjects.PARKED_USAGE_SUBJECT}
        try:
            message = await bus.get_message(subjects.PARKED_STREAM, **query)
        except ApiError as error:
            if error.code == STREAM_NOT_FOUND:  # no gateway of a release that creates the stream has run yet
                return
            raise
        if message is None:
            return
        sequence = int(message["seq"])
        try:
            yield sequence, decode_parked(base64.b64decode(message["data"]))
        except ProtocolError as error:
            log.warning("parked record %d: %s", sequence, error)


async def replay(bus: Bus, sequence: int, record: ParkedUsage) -> None:
    """Publish a parked record to USAGE again. Raises BusError. A record replayed twice is written once."""
    message_id = f"parked.{sequence}"
    subject = record.subject or subjects.REQUEST_USAGE_SUBJECT
    await bus.publish_durable(subject, record.message, message_id=message_id)
    await bus.delete_message(subjects.PARKED_STREAM, sequence)


class Replays:
    """Replays the parked records that this build can decode, once a period."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._checked_s = float("-inf")  # monotonic clock
        self._sequence = 0  # in PARKED, up to which all records have been checked

    async def replay_due(self) -> None:
        """Once a period, check the records parked since the last check."""
        if time.monotonic() - self._checked_s < REPLAY_PERIOD_S:
            return
        self._checked_s = time.monotonic()
        replayed = checked = 0
        try:
            async for sequence, record in parked_records(self._bus, self._sequence):
                if not record.is_refused and not read_usage(record.message)[1]:
                    await replay(self._bus, sequence, record)
                    replayed += 1
                self._sequence = sequence
                checked += 1
                if checked == REPLAY_RECORDS:
                    self._checked_s = float(
                        "-inf"
                    )  # continue on the next call, after the messages that arrived meanwhile
                    break
        except BusError as error:
            log.warning("cannot check the parked usage records, will retry: %s", error)
        if replayed:
            log.warning("replayed %d parked usage records that this release can decode", replayed)
