"""Usage records that a ledger writer could not take, in the PARKED stream: nothing that cost something is thrown away.

USAGE ──not understood, or refused by the database──> PARKED ──by a build that understands, or by hand──> USAGE
"""

from typing import Final

import msgspec
from msgspec import Struct

from protocol import wire

MAX_REASON_CHARS: Final = 500
MAX_MESSAGE_BYTES: Final = 1024 * 1024  # kept of one; gateways and workers send a quarter of it at once


class ParkedUsage(Struct, frozen=True, omit_defaults=True):
    """One record, as it came."""

    v: int
    message: bytes  # of the USAGE stream, with this record alone, or wholly unreadable
    reason: str
    parked_unix_ms: int
    is_refused: bool = False  # by the database: it was understood, and only a person can say what to do
    subject: str = ""  # that it came on, which says who may have sent it; empty: an older release has parked it


_decoder = msgspec.msgpack.Decoder(ParkedUsage)


def decode_parked(payload: bytes) -> ParkedUsage:
    """Decode a ParkedUsage. Raises ProtocolError."""
    return wire.decode_versioned(_decoder, payload, "parked record")
