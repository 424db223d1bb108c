"""Decoding of messages: any invalid message raises ProtocolError.

A message names its protocol version in its first field, ``v``, in maps and arrays. Its numbers are finite and bounded,
so that they can be summed and stored without further checks.
"""

from typing import Annotated, Final, Protocol, TypeVar

import msgspec
from msgspec import Meta, Struct

from protocol.errors import NewerVersion, ProtocolError

PROTOCOL_VERSION: Final = 1  # written by this build
OLDEST_VERSION: Final = 1  # read by this build; not newer than the previous release writes

# The exceptions of msgspec's decoders for undecodable bytes. Text that is not UTF-8, and deep nesting (about 1,000
# brackets, even in an unknown field), raise built-in exceptions.
UNDECODABLE: Final = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)

_LARGEST_NUMBER: Final = 2**53  # doubles represent all integers up to this; SQL's integers are larger
Whole = Annotated[int, Meta(ge=-_LARGEST_NUMBER, le=_LARGEST_NUMBER)]
Real = Annotated[float, Meta(ge=-_LARGEST_NUMBER, le=_LARGEST_NUMBER)]  # excludes infinity and NaN

_Message_co = TypeVar("_Message_co", covariant=True)


class Decoder(Protocol[_Message_co]):
    """A msgspec decoder, of msgpack or JSON."""

    def decode(self, buf: bytes, /) -> _Message_co:
        """Decode one message. Raises one of UNDECODABLE."""
        ...


class Versioned(Protocol):
    """A message with a protocol version."""

    @property
    def v(self) -> int: ...


class _Head(Struct):
    v: int


class _ArrayHead(Struct, array_like=True):
    v: int


_VersionedMessage = TypeVar("_VersionedMessage", bound=Versioned)
_head_decoder = msgspec.msgpack.Decoder(_Head)
_heads_decoder = msgspec.msgpack.Decoder(list[_Head])
_array_head_decoder = msgspec.msgpack.Decoder(_ArrayHead)


def decode(decoder: Decoder[_Message_co], payload: bytes, what: str = "message") -> _Message_co:
    """Decode ``payload``, named ``what`` in errors. Raises ProtocolError."""
    try:
        return decoder.decode(payload)
    except UNDECODABLE as error:
        raise ProtocolError(f"undecodable {what}: {error}") from error


def decode_versioned(decoder: Decoder[_VersionedMessage], payload: bytes, what: str = "message") -> _VersionedMessage:
    """Decode a map with a version. Raises ProtocolError, or NewerVersion for a newer version."""
    try:
        message = decode(decoder, payload, what)
    except ProtocolError:
        check_version(decode(_head_decoder, payload, what).v)
        raise
    check_version(message.v)
    return message


def decode_all(decoder: Decoder[list[_VersionedMessage]], payload: bytes) -> list[_VersionedMessage]:
    """Decode an array of maps, each with a version. Raises ProtocolError, or NewerVersion for a newer version."""
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
    """Raise ProtocolError if an array has an unsupported version."""
    check_version(decode(_array_head_decoder, payload).v)


def check_version(version: int) -> None:
    """Raise ProtocolError if a message's version is unsupported."""
    if version > PROTOCOL_VERSION:
        raise NewerVersion(f"message speaks protocol {version}, this build speaks {PROTOCOL_VERSION}")
    if version < OLDEST_VERSION:
        raise ProtocolError(f"message speaks protocol {version}, this build reads {OLDEST_VERSION} and later")
