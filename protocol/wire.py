"""Decoding what came over the wire: any fault in it is a ProtocolError.

A message says which version of the protocol it speaks: its first field, ``v``, in a map as in an array. Its numbers are
finite and bounded, so that nobody who adds them up or stores them has to ask.
"""

from typing import Annotated, Final, Protocol, TypeVar

import msgspec
from msgspec import Meta, Struct

from protocol.errors import NewerVersion, ProtocolError

PROTOCOL_VERSION: Final = 1  # that is written
OLDEST_VERSION: Final = 1  # that is read: no newer than what the release before writes

# What a decoder of msgspec raises for bytes that it cannot read. Text that is not UTF-8, and nesting that exhausts the
# stack (about 1,000 brackets, of a field that nobody reads, too), raise Python's own exceptions.
UNDECODABLE: Final = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)

_LARGEST_NUMBER: Final = 2**53  # up to here a double holds every integer; SQL's integers reach further
Whole = Annotated[int, Meta(ge=-_LARGEST_NUMBER, le=_LARGEST_NUMBER)]
Real = Annotated[float, Meta(ge=-_LARGEST_NUMBER, le=_LARGEST_NUMBER)]  # neither infinite nor NaN

_Message_co = TypeVar("_Message_co", covariant=True)


class Decoder(Protocol[_Message_co]):
    """A msgspec decoder, of msgpack or JSON."""

    def decode(self, buf: bytes, /) -> _Message_co:
        """Decode one message. Raises one of UNDECODABLE."""
        ...


class Versioned(Protocol):
    """A message that says which version it speaks."""

    @property
    def v(self) -> int:
        """The version."""
        ...


class _Head(Struct):
    v: int


class _ArrayHead(Struct, array_like=True):
    v: int


_VersionedMessage = TypeVar("_VersionedMessage", bound=Versioned)
_head_decoder = msgspec.msgpack.Decoder(_Head)
_heads_decoder = msgspec.msgpack.Decoder(list[_Head])
_array_head_decoder = msgspec.msgpack.Decoder(_ArrayHead)


def decode(decoder: Decoder[_Message_co], payload: bytes, what: str = "message") -> _Message_co:
    """Decode ``payload``, of which errors speak as ``what``. Raises ProtocolError."""
    try:
        return decoder.decode(payload)
    except UNDECODABLE as error:
        raise ProtocolError(f"undecodable {what}: {error}") from error


def decode_versioned(decoder: Decoder[_VersionedMessage], payload: bytes, what: str = "message") -> _VersionedMessage:
    """Decode a map with its version. Raises ProtocolError, NewerVersion where that is why it cannot be read."""
    try:
        message = decode(decoder, payload, what)
    except ProtocolError:
        check_version(decode(_head_decoder, payload, what).v)
        raise
    check_version(message.v)
    return message


def decode_all(decoder: Decoder[list[_VersionedMessage]], payload: bytes) -> list[_VersionedMessage]:
    """Decode an array of maps, each with its version. Raises ProtocolError, NewerVersion likewise."""
    try:
        messages = decode(decoder, payload)
    except ProtocolError:
        for head in decode(_heads_decoder, payload):
            check_version(head.v)
        raise
    for message in messages:
        check_version(message.v)
    return messages


def check_array_version(payload: bytes) -> None:
    """Raise ProtocolError where an array is of a version that this build does not read."""
    check_version(decode(_array_head_decoder, payload).v)


def check_version(version: int) -> None:
    """Raise ProtocolError where a message is of a version that this build does not read."""
    if version > PROTOCOL_VERSION:
        raise NewerVersion(f"message speaks protocol {version}, this build speaks {PROTOCOL_VERSION}")
    if version < OLDEST_VERSION:
        raise ProtocolError(f"message speaks protocol {version}, this build reads {OLDEST_VERSION} and later")
