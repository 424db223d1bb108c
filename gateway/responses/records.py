"""What is kept of a response, as messages of the stream RES. All of it is sealed (``ledger.payloads.sealing``)."""

from typing import Final

import msgspec
from msgspec import Struct

from protocol import wire


class Run(Struct, frozen=True):
    """A response that is being made in the background, and whatever another gateway needs to go on with it."""

    v: int
    owner: str  # the gateway that makes it; empty: none
    response_id: str
    tenant: str
    team_id: str
    key_id: str
    received_unix_ms: int
    body: bytes  # of the request, with the whole conversation
    response: bytes  # the response as it was at first: JSON
    tries: int = 0  # that have ended without its end: a gateway was lost with it, or could not make it
    reason: str = ""  # why the last of them has


class EventsPart(Struct, frozen=True):
    """The next events of a response in the background, and what they were made of.

    A part without events says that another gateway goes on: what the one before still tries to add comes too late.
    """

    v: int
    owner: str
    attempt: int  # of the request, that is under way
    revision: str  # protocol.job.Accepted.revision of whoever has made the tokens
    first: int  # number of the first event
    count: int  # of the events
    events: bytes
    frames: tuple[bytes, ...] = ()  # Tokens and Deltas, as protocol.job.encode makes them
    response: bytes = b""  # JSON; with the last event: the response as it is from now on

    @property
    def is_last(self) -> bool:
        """True if it has the last event."""
        return bool(self.response)


class StoredResponse(Struct, frozen=True):
    """A response that has ended, and the conversation that it belongs to."""

    v: int
    response: bytes  # JSON
    items: bytes  # JSON: the input items, those of earlier responses included; empty: too large to be kept


class Question(Struct, frozen=True, array_like=True):
    """Ask a gateway which of these responses it makes in the background; the reply is the list of those."""

    response_ids: tuple[str, ...]


encode: Final = msgspec.msgpack.Encoder().encode
_run_decoder = msgspec.msgpack.Decoder(Run)
_part_decoder = msgspec.msgpack.Decoder(EventsPart)
_stored_decoder = msgspec.msgpack.Decoder(StoredResponse)
_question_decoder = msgspec.msgpack.Decoder(Question)


def decode_run(payload: bytes) -> Run:
    """Decode a Run. Raises ProtocolError."""
    return wire.decode_versioned(_run_decoder, payload, "background response")


def decode_part(payload: bytes) -> EventsPart:
    """Decode an EventsPart. Raises ProtocolError."""
    return wire.decode_versioned(_part_decoder, payload, "events of a response")


def decode_stored(payload: bytes) -> StoredResponse:
    """Decode a StoredResponse. Raises ProtocolError."""
    return wire.decode_versioned(_stored_decoder, payload, "stored response")


def decode_question(payload: bytes) -> Question:
    """Decode a Question. Raises ProtocolError."""
    return wire.decode(_question_decoder, payload, "question")
