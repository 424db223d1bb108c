"""Dead letters: published to the DLQ stream until stored, within bounds, and read from it."""

import asyncio
import base64
import logging
from typing import Final

from protocol import subjects
from protocol.errors import STREAM_NOT_FOUND, ApiError, BusError, PayloadTooLarge, ProtocolError
from protocol.job import encode
from protocol.nats.bus import Bus
from protocol.process import backoff_s
from protocol.usage import DeadLetter, decode_dead_letter

MAX_WAITING: Final = 1000  # beyond, a letter is only logged: requests that fail by the thousand are news enough
STORE_LIMIT_S: Final = 120.0

log = logging.getLogger(__name__)


class DeadLetters:
    """Publishes each dead letter; ``publish`` returns when it is stored or given up."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._waiting = 0

    async def publish(self, letter: DeadLetter) -> None:
        """Store one dead letter in the stream, which keeps those of the last weeks."""
        if self._waiting >= MAX_WAITING:
            log.error("dead letter of %s is lost: too many wait to be stored", letter.request_id)
            return
        self._waiting += 1
        try:
            async with asyncio.timeout(STORE_LIMIT_S):
                await self._publish_until_stored(letter)
        except (TimeoutError, PayloadTooLarge) as error:
            log.error("dead letter of %s is lost: %s", letter.request_id, error or "not stored in time")  # noqa: TRY400
        finally:
            self._waiting -= 1

    async def _publish_until_stored(self, letter: DeadLetter) -> None:
        subject, payload = subjects.dead_letter_subject(letter.model), encode(letter)
        for wait_s in backoff_s():
            try:
                await self._bus.publish_durable(subject, payload, message_id=letter.request_id)
            except PayloadTooLarge:
                raise
            except BusError as error:
                log.debug("dead letter of %s is not stored yet: %s", letter.request_id, error)
            else:
                return
            await asyncio.sleep(wait_s)


async def newest_dead_letters(bus: Bus, limit: int) -> list[DeadLetter]:
    """Return the newest dead letters first, without those that this build cannot read. Raises BusError."""
    stream = subjects.DEAD_LETTER_STREAM
    try:
        state = (await bus.api(f"STREAM.INFO.{stream}"))["state"]
    except ApiError as error:
        if error.code == STREAM_NOT_FOUND:  # no gateway has been there yet
            return []
        raise
    first, last = int(state["first_seq"]), int(state["last_seq"])
    oldest = max(1, first, last - limit + 1)  # a stream that has never had one counts from 0
    letters = [await _letter(bus, sequence) for sequence in range(last, oldest - 1, -1)]
    return [letter for letter in letters if letter is not None]


async def _letter(bus: Bus, sequence: int) -> DeadLetter | None:
    message = await bus.get_message(subjects.DEAD_LETTER_STREAM, seq=sequence)
    if message is None:
        return None
    try:
        return decode_dead_letter(base64.b64decode(message["data"]))
    except ProtocolError as error:
        log.warning("dead letter %d: %s", sequence, error)
        return None
