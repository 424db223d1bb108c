"""The queue server's news of connections that have ended: of workers, by the names of their connections."""

from typing import Final

import msgspec
from msgspec import Struct

from protocol import subjects, wire


class _Client(Struct):
    name: str = ""


class _Event(Struct):
    client: _Client
    reason: str = ""


_decoder: Final = msgspec.json.Decoder(_Event)


class Disconnect(Struct, frozen=True):
    """A worker's connection has ended."""

    worker_id: str
    reason: str  # the server's, such as "Client Closed"


def decode_disconnect(payload: bytes) -> Disconnect | None:
    """Decode an event of ``subjects.DISCONNECTS``; None where the connection was no worker's. Raises ProtocolError."""
    event = wire.decode(_decoder, payload, "disconnect event")
    worker_id = subjects.worker_of_connection(event.client.name)
    return None if worker_id is None else Disconnect(worker_id, event.reason)
