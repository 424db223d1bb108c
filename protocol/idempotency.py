"""Messages between gateways about requests that carry an ``Idempotency-Key``.

The ``idempotency`` bucket holds one Claim per key: which gateway runs the request, or has its answer. A gateway that
is asked the same again reads the answer from that one, part by part:

    gateway ──AnswerPartRequest (request)──> owner     core NATS, ``subjects.answers_subject``
    gateway <──Part (reply)─────── owner

Asking part by part needs no state at the owner, loses nothing (a lost reply is asked for again), and tells at once
when the owner is gone: the server itself answers for a subject that nobody listens on.
"""

from enum import StrEnum
from typing import Final

import msgspec
from msgspec import Struct

from protocol import wire

MAX_PART_BYTES: Final = 64 * 1024
PART_WAIT_S: Final = 1.0  # how long an owner keeps a question for which there is nothing new yet


class Claim(Struct, frozen=True):
    """The value of a key in the bucket."""

    gateway_id: str
    fingerprint: str  # of the request's path and body


class AnswerPartRequest(Struct, frozen=True, array_like=True):
    """The answer to this request, please, from here on."""

    name: str  # of the key in the bucket
    fingerprint: str
    position: int  # bytes of the body that the asker has


class ClaimState(StrEnum):
    """The state of a request, as reported by the owner of its key."""

    UNKNOWN = "unknown"  # it has forgotten the key: take it over
    REUSED = "reused"  # another request has this key
    ATTACHED = "attached"  # running
    REPLAYED = "replayed"  # ended well
    NOT_KEPT = "not kept"  # it runs, but the answer has outgrown the room for what was asked


class Part(Struct, frozen=True, array_like=True):
    """A piece of an answer."""

    standing: ClaimState
    status: int = 0  # HTTP; 0: there is none yet
    headers: tuple[tuple[bytes, bytes], ...] = ()
    body: bytes = b""
    ended: bool = False  # there will be no more
    complete: bool = False  # and this was really all


encode = msgspec.msgpack.Encoder().encode
_claim_decoder = msgspec.msgpack.Decoder(Claim)
_ask_decoder = msgspec.msgpack.Decoder(AnswerPartRequest)
_part_decoder = msgspec.msgpack.Decoder(Part)


def decode_claim(payload: bytes) -> Claim:
    """Decode a Claim. Raises ProtocolError."""
    return wire.decode(_claim_decoder, payload, "claim")


def decode_ask(payload: bytes) -> AnswerPartRequest:
    """Decode an AnswerPartRequest. Raises ProtocolError."""
    return wire.decode(_ask_decoder, payload, "question")


def decode_part(payload: bytes) -> Part:
    """Decode a Part. Raises ProtocolError."""
    return wire.decode(_part_decoder, payload, "part of an answer")
