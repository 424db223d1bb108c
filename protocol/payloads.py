"""Messages of gateways to the ledger in the PAYLOADS stream: requests and answers, of clients that agreed to it."""

from collections.abc import Sequence

import msgspec
from msgspec import Struct

from protocol import wire
from protocol.errors import NewerVersion, ProtocolError
from protocol.messages import encode
from protocol.wire import Whole


class PayloadRecord(Struct, frozen=True, omit_defaults=True):
    """One answered request with its answer, published once, compressed and, where there is a key, encrypted."""

    v: int
    request_id: str
    received_unix_ms: Whole
    model: str  # canonical name
    endpoint: str  # see Origin
    key_id: str
    team_id: str
    end_user: str | None  # the client's name for its end user
    train_ok: bool
    redacted: bool
    expires_unix_ms: Whole
    encoding: str  # of both that follow (ledger.payloads.sealing)
    dropped: bool = False  # it may not be kept, or is too large: request and answer are left out
    request: bytes | None = None
    answer: bytes | None = None


_decoder: msgspec.msgpack.Decoder[list[PayloadRecord]] = msgspec.msgpack.Decoder(list[PayloadRecord])
_sealed_decoder: msgspec.msgpack.Decoder[list[msgspec.Raw]] = msgspec.msgpack.Decoder(list[msgspec.Raw])


def encode_payloads(records: Sequence[PayloadRecord]) -> bytes:
    """Make one message of the PAYLOADS stream: a msgpack array of records."""
    return encode(list(records))


def decode_payloads(message: bytes) -> list[PayloadRecord]:
    """Decode a message of the PAYLOADS stream. Raises ProtocolError."""
    return wire.decode_all(_decoder, message)


def read_payloads(message: bytes) -> tuple[list[PayloadRecord], list[str]]:
    """Return a message's records, and why others cannot be read: one takes no other along.

    Raises NewerVersion for a message of a newer release, and ProtocolError for one that holds no list.
    """
    try:
        return decode_payloads(message), []
    except NewerVersion:
        raise
    except ProtocolError:
        sealed = wire.decode(_sealed_decoder, message)
    records: list[PayloadRecord] = []
    reasons: list[str] = []
    for record in sealed:
        try:
            records += decode_payloads(encode([record]))
        except ProtocolError as error:
            reasons.append(str(error))
    return records, reasons
