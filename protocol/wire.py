"""Decoding what came over the wire: any fault in it is a ProtocolError."""

from typing import Protocol, TypeVar

import msgspec

from protocol.errors import ProtocolError

_Message_co = TypeVar("_Message_co", covariant=True)


class Decoder(Protocol[_Message_co]):
    """A msgspec decoder, of msgpack or JSON."""

    def decode(self, buf: bytes, /) -> _Message_co:
        """Raises MsgspecError."""
        ...


def decode(decoder: Decoder[_Message_co], payload: bytes, what: str = "message") -> _Message_co:
    """Decode ``payload``, of which errors speak as ``what``. Raises ProtocolError."""
    try:
        return decoder.decode(payload)
    except msgspec.MsgspecError as error:
        raise ProtocolError(f"undecodable {what}: {error}") from error
