"""The end of the road: the story of a request that was given up, from its gateway to the DLQ stream."""

import msgspec
from msgspec import Struct

from protocol import wire
from protocol.messages import Sampling


class AttemptFailure(Struct, frozen=True, omit_defaults=True):
    """Why one attempt did not end in an answer, as its gateway saw it."""

    attempt: int
    worker_id: str | None  # None: no worker had accepted it
    code: str  # protocol.errors.ErrorCode
    reason: str
    completion_tokens: int  # of this attempt, as far as the gateway has seen them


class DeadLetter(Struct, frozen=True, omit_defaults=True):
    """A request that was given up after its last attempt. Neither prompt nor answer: those are kept by consent only."""

    v: int
    request_id: str
    gateway_id: str
    model: str
    tenant: str
    key_id: str
    prompt_tokens: int
    sampling: Sampling
    accepted_unix_ms: int
    given_up_unix_ms: int
    failures: tuple[AttemptFailure, ...]


_decoder = msgspec.msgpack.Decoder(DeadLetter)


def decode_dead_letter(payload: bytes) -> DeadLetter:
    """Decode a DeadLetter. Raises ProtocolError."""
    return wire.decode_versioned(_decoder, payload)
