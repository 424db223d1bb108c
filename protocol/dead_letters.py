"""The end of the road: the story of a request that was given up, from its gateway to the DLQ stream."""

from typing import Final

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from protocol import wire
from protocol.messages import Sampling, encode


class AttemptFailure(Struct, frozen=True, omit_defaults=True):
    """The reason why one attempt did not end in an answer, as its gateway saw it."""

    attempt: int
    worker_id: str | None  # None: no worker had accepted it
    code: str  # protocol.errors.ErrorCode
    reason: str
    completion_tokens: int  # of this attempt, as far as the gateway has seen them


class DeadLetter(Struct, frozen=True, omit_defaults=True):
    """A request that was given up after its last attempt. What its caller wrote is not in it: that takes consent."""

    v: int
    request_id: str
    gateway_id: str
    model: str
    tenant: str
    key_id: str
    prompt_tokens: int
    sampling: Sampling  # without what the caller wrote or listed: see sampling_without_texts
    accepted_unix_ms: int
    given_up_unix_ms: int
    failures: tuple[AttemptFailure, ...]
    withheld_bytes: dict[str, int] = {}  # how much was left out of ``sampling``, by field, as it travels
    grammar_sha256: str = ""  # by which one that kills workers is known again; "": there was none


_CALLERS_OWN: Final = ("stop", "bad_words", "logit_bias", "stop_token_ids", "allowed_token_ids")


def sampling_without_texts(sampling: Sampling) -> tuple[Sampling, dict[str, int]]:
    """Leave out what a caller wrote; returns how much of each field that was, too."""
    withheld = {name: len(encode(getattr(sampling, name))) for name in _CALLERS_OWN if getattr(sampling, name)}
    grammar = sampling.grammar
    if grammar is not None and grammar.source:
        withheld["grammar"] = len(grammar.source.encode())
        grammar = replace(grammar, source="")
    empty = {name: type(getattr(sampling, name))() for name in withheld if name != "grammar"}
    return replace(sampling, grammar=grammar, **empty), withheld


_decoder = msgspec.msgpack.Decoder(DeadLetter)


def decode_dead_letter(payload: bytes) -> DeadLetter:
    """Decode a DeadLetter. Raises ProtocolError."""
    return wire.decode_versioned(_decoder, payload)
