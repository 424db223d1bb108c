"""Reads the events of background responses, which any gateway may generate."""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from functools import partial
from typing import Any, Final

import msgspec

from gateway.api.openai_items import Item, with_history
from gateway.errors import InvalidParameter, Overloaded, RateLimitExceeded
from gateway.responses.messages import Key, Unreadable
from gateway.responses.store import EventsPart, Kept, ResponseStore, StoredResponse, retry_bus
from protocol.errors import BusError
from protocol.process import backoff_s, wait_for
from protocol.wire import PROTOCOL_VERSION

log = logging.getLogger(__name__)


LOOK_S: Final = 1.0  # interval of polling for new events without a notification
AWAY_LIMIT_S: Final = 60.0  # how long a reader waits for an unavailable queue server
EVENT_END: Final = b"\n\n"


class EventsLost(Exception):
    """The events end without a final event, and no gateway runs the response."""


async def follow(store: ResponseStore, key: Key, after: int, comment_s: float) -> AsyncGenerator[bytes, None]:
    """Yield the events after a number, up to the final one, and a comment after ``comment_s`` without events.

    ``comment_s``: in seconds; 0: no comments. Raises EventsLost, ProtocolError, BusError if the queue server
    stays unavailable, and the errors of the store's shares if they stay full.
    """
    sequence = 0
    silent_since_s = time.monotonic()
    async with store.listening(key) as added:
        while True:
            added.clear()
            async with aclosing(_parts(store, key, sequence)) as parts:
                async for part, number in parts:
                    sequence = number
                    events = events_after(part, after)
                    if events:
                        silent_since_s = time.monotonic()
                        yield events
                    if part.is_last:
                        return
            if not await wait_for(added, LOOK_S) and await _is_over(store, key, sequence):
                raise EventsLost(f"the events of {key.response_id} have no final event")
            if comment_s and time.monotonic() - silent_since_s >= comment_s:
                silent_since_s = time.monotonic()
                yield b": waiting\n\n"


async def _parts(store: ResponseStore, key: Key, sequence: int) -> AsyncGenerator[tuple[EventsPart, int], None]:
    """Iterate over the stored parts. Wait while the queue server is unavailable or the tenant's share is full."""
    until_s = time.monotonic() + AWAY_LIMIT_S
    for wait_s in backoff_s():
        try:
            async with aclosing(store.events(key, sequence)) as events:
                async for part, number in events:
                    sequence = number
                    yield part, number
        except (BusError, RateLimitExceeded, Overloaded):
            if time.monotonic() + wait_s >= until_s:
                raise
        else:
            return
        await asyncio.sleep(wait_s)


async def _is_over(store: ResponseStore, key: Key, sequence: int) -> bool:
    """Return whether no gateway runs it and no new part has arrived."""
    try:
        return not await store.is_made(key) and not await store.has_part(key, sequence)
    except BusError as error:
        log.warning("it is unknown whether response %s is still running: %s", key.response_id, error)
        return False


def events_after(part: EventsPart, after: int) -> bytes:
    """Return the events of a part after a number."""
    skipped = max(0, after + 1 - part.first)
    if not skipped:
        return part.events
    return b"".join(event + EVENT_END for event in part.events.split(EVENT_END)[skipped:-1])


# --- conversation -----------------------------------------------------------------------------------------------------
#
# Conversations that responses continue and store.

PARAM: Final = "previous_response_id"

_encode = msgspec.json.Encoder().encode


async def continued(store: ResponseStore, previous: Key, body: bytes) -> bytes:
    """Return a body with the conversation of a stored response prepended to its input.

    Raises InvalidParameter, BusError, ProtocolError, and the errors of the store's shares.
    """
    try:
        merged = await retry_bus(lambda: store.read(previous, partial(_continued, body, store.max_body_bytes)))
    except Unreadable as error:
        raise InvalidParameter(f"The previous response cannot be continued: {error}.", param=PARAM) from error
    if merged is None:
        hint = "Was it stored ('store': true), and has it ended?"
        message = f"Previous response with id '{previous.response_id}' not found. {hint}"
        raise InvalidParameter(message, param=PARAM, code="previous_response_not_found")
    return merged


def _continued(body: bytes, max_bytes: int, kept: Kept) -> bytes | None:
    if not kept.is_over:
        return None
    merged = with_history(body, kept.items, kept.answer)
    if len(merged) > max_bytes:
        message = f"The conversation has {len(merged)} bytes with this input; a request may have at most {max_bytes}."
        raise InvalidParameter(message, param=PARAM, code="too_large")
    return merged


async def keep(store: ResponseStore, tenant: str, response: dict[str, Any], items: list[Item]) -> None:
    """Store an ended response with its input items. Raises BusError and NotKept."""
    stored = StoredResponse(PROTOCOL_VERSION, _encode(response), _encode(items))
    await retry_bus(lambda: store.put(Key(tenant, response["id"]), stored))
