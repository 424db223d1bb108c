"""The events of webhooks, and the functions that publish them.

A body has the format of OpenAI's webhooks:

    {"id": "evt_…", "object": "event", "type": "response.completed", "created_at": 1764000000, "data": {"id": "resp_…"}}

An event's id is derived from its content, so an event that may not have been published can be published again: the
stream drops it by its message id, and later its row in SQL does.
"""

import hashlib
from collections.abc import Mapping
from typing import Any, Final, Literal, get_args

import msgspec
from msgspec import Struct

from protocol import subjects, wire
from protocol.nats.bus import Bus

EventType = Literal[
    "response.completed",
    "response.failed",
    "response.cancelled",
    "response.incomplete",
    "batch.completed",
    "batch.failed",
    "batch.expired",
    "batch.cancelled",
    "team.budget.threshold",
]
EVENT_TYPES: Final[tuple[EventType, ...]] = get_args(EventType)
# Final values of ``status`` of a response and a batch.
_RESPONSE_EVENTS: Final[dict[str, EventType]] = {
    "completed": "response.completed",
    "failed": "response.failed",
    "incomplete": "response.incomplete",
    "cancelled": "response.cancelled",
}
_BATCH_EVENTS: Final[dict[str, EventType]] = {
    "completed": "batch.completed",
    "failed": "batch.failed",
    "expired": "batch.expired",
    "cancelled": "batch.cancelled",
}
_ID_BYTES: Final = 16


class Event(Struct, frozen=True):
    """One event of a team, as a message of the WEBHOOKS stream."""

    v: int
    team_id: str
    id: str  # "evt_…"
    type: str
    body: bytes  # the JSON that is sent


_decoder = msgspec.msgpack.Decoder(Event)
encode_event = msgspec.msgpack.Encoder().encode


def decode_event(payload: bytes) -> Event:
    """Decode a message of the WEBHOOKS stream. Raises ProtocolError."""
    return wire.decode_versioned(_decoder, payload, "webhook event")


def event_id(*facts: str) -> str:
    """Return the id that is derived from these facts."""
    return f"evt_{hashlib.blake2b(chr(0).join(facts).encode(), digest_size=_ID_BYTES).hexdigest()}"


def new_event(
    team_id: str, event_type: EventType, identity: str, data: Mapping[str, Any], *, created_unix_s: int
) -> Event:
    """Create an event with this id."""
    body = {"id": identity, "object": "event", "type": event_type, "created_at": created_unix_s, "data": data}
    return Event(wire.PROTOCOL_VERSION, team_id, identity, event_type, msgspec.json.encode(body))


async def publish(bus: Bus, event: Event) -> None:
    """Store an event. Raises StreamFull, BusTimeout, other BusErrors: then publish the same again."""
    await bus.publish_durable(subjects.WEBHOOK_EVENT_SUBJECT, encode_event(event), message_id=event.id)


async def publish_finished(
    bus: Bus, team_id: str, event_type: EventType, object_id: str, *, created_unix_s: int
) -> None:
    """Publish that a team's response or batch with this id has ended; once this returns, the event is on disk.

    Raises StreamFull, BusTimeout, other BusErrors: then call again with the same arguments; it is published once.
    """
    identity = event_id(team_id, event_type, object_id)
    await publish(bus, new_event(team_id, event_type, identity, {"id": object_id}, created_unix_s=created_unix_s))


async def publish_response_ended(bus: Bus, team_id: str, status: str, response_id: str, ended_unix_s: int) -> None:
    """Publish that a response has ended with this status. Raises like ``publish_finished``."""
    await publish_finished(bus, team_id, _RESPONSE_EVENTS[status], response_id, created_unix_s=ended_unix_s)


async def publish_batch_ended(bus: Bus, team_id: str, status: str, batch_id: str, ended_unix_s: int) -> None:
    """Publish that a batch has ended with this status. Raises like ``publish_finished``."""
    await publish_finished(bus, team_id, _BATCH_EVENTS[status], batch_id, created_unix_s=ended_unix_s)
