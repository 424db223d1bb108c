"""Messages between gateways about lanes: which one each tenant's jobs wait in.

A tenant's jobs wait in one lane of a queue, or it would have a second share of the workers. Each gateway tells so
every half second, and what it said last counts for a little longer.

    gateway ──LanesInUse──> all gateways     core NATS, ``subjects.LANES_IN_USE``
"""

import msgspec
from msgspec import Struct

from protocol import wire


class LaneInUse(Struct, frozen=True, array_like=True):
    """A tenant has jobs waiting in a lane of a queue."""

    tenant: str
    queue: str  # subjects.queue_of
    lane: str


class LanesInUse(Struct, frozen=True, array_like=True):
    """All of them at one gateway."""

    gateway_id: str
    lanes: tuple[LaneInUse, ...]


encode = msgspec.msgpack.Encoder().encode
_decoder = msgspec.msgpack.Decoder(LanesInUse)


def decode_lanes(payload: bytes) -> LanesInUse:
    """Decode a LanesInUse. Raises ProtocolError."""
    return wire.decode(_decoder, payload, "lanes")
