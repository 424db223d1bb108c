"""Messages by which the ledger learns which of the requests without a record still run.

    ledger writer ──OpenRequestsQuery (request)──> gateway     core NATS, ``subjects.open_requests_subject``
    ledger writer <──StillOpen (reply)── gateway

A gateway that has died answers nothing: the queue server itself says at once that nobody listens there.
"""

from typing import Final

import msgspec
from msgspec import Struct

from protocol import wire
from protocol.wire import Whole

MAX_ASKED: Final = 1000  # requests in one question


class OpenRequestsQuery(Struct, frozen=True, array_like=True):
    """Say which of these requests you still have."""

    request_ids: tuple[str, ...]


class StillOpen(Struct, frozen=True, array_like=True):
    """Those that run, or whose records are not stored yet."""

    completion_tokens: dict[str, Whole]  # by request: output tokens so far, over all choices


encode = msgspec.msgpack.Encoder().encode
_ask_decoder = msgspec.msgpack.Decoder(OpenRequestsQuery)
_answer_decoder = msgspec.msgpack.Decoder(StillOpen)


def decode_ask(payload: bytes) -> OpenRequestsQuery:
    """Decode an OpenRequestsQuery. Raises ProtocolError."""
    return wire.decode(_ask_decoder, payload, "question")


def decode_answer(payload: bytes) -> StillOpen:
    """Decode a StillOpen. Raises ProtocolError."""
    return wire.decode(_answer_decoder, payload, "answer")
