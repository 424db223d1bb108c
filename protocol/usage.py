"""Messages of gateways and workers to the ledger in the USAGE stream: a record of each request and each attempt.

And an intent of each stream, stored before anything is sent to its client: what the ledger makes the request's row of,
should its gateway not live to leave the record. The record of a whole answer is itself stored before that.
"""

from collections.abc import Sequence
from typing import Annotated, Final

import msgspec
from msgspec import Meta, Struct

from protocol import wire
from protocol.chat import CountedBy
from protocol.errors import ProtocolError
from protocol.messages import encode
from protocol.rescue import Rescue
from protocol.wire import Real, Whole


class RequestRecord(Struct, frozen=True, tag="request", omit_defaults=True):
    """One admitted request, published once by its gateway when it has ended in whatever way."""

    v: int
    request_id: str
    gateway_id: str
    received_unix_ms: Whole
    endpoint: str  # see Origin
    model: str
    key_id: str
    key_name: str
    stream: bool
    outcome: str  # "ok" | "cancelled" | "failed"
    http_status: Whole  # as sent, or about to be; 499 for a caller that left before the headers
    error_code: str | None
    finish_reason: str | None  # of choice 0
    prompt_tokens: Whole
    cached_tokens: Whole
    completion_tokens: Whole  # over all choices
    attempts: Whole
    queue_ms: Real | None  # admission → accepted by the last attempt's worker
    ttft_ms: Real | None  # received → first token at the gateway
    total_ms: Real  # received → ended
    pool: str | None  # of the last attempt
    provider: str | None
    region: str | None
    engine_queue_ms: Real | None = None  # this and what follows: sums over its attempts (gateway.dispatch.attempts)
    prefill_ms: Real | None = None
    decode_ms: Real | None = None
    preemptions: Whole | None = None
    team_id: str | None = None
    organisation_id: str | None = None
    tier: str | None = None  # of the last attempt's pool
    counted_by: CountedBy = "engine"  # "provider": as a hosted API says; "estimate": in parts, as none has said


class AttemptRecord(Struct, frozen=True, tag="attempt", omit_defaults=True):
    """One try of one request on one worker, published by that worker when the try has ended.

    For a worker that was lost, its gateway publishes one, as far as it has seen; the ledger keeps the first that comes.
    """

    v: int
    request_id: str
    attempt: Whole
    worker_id: str
    pool: str
    provider: str
    region: str
    tier: str
    engine: str
    model: str
    started_unix_ms: Whole
    outcome: str  # "ok" | "cancelled" | "failed"
    error_code: str | None
    prompt_tokens: Whole
    cached_tokens: Whole
    completion_tokens: Whole
    queue_ms: Real
    ttft_ms: Real | None  # pull → first token
    total_ms: Real  # pull → end
    usd_per_hour: Real
    resumed_tokens: Whole = 0  # output tokens that it began with, over all choices
    received_unix_ms: Whole = 0  # when the gateway received the request
    gateway_id: str | None = None  # this and what follows: its Origin
    endpoint: str | None = None
    key_id: str | None = None
    key_name: str | None = None
    stream: bool | None = None
    engine_queue_ms: Real | None = None  # this and what follows: see Timings; None: not known
    prefill_ms: Real | None = None
    decode_ms: Real | None = None
    preemptions: Whole | None = None
    team_id: str | None = None
    organisation_id: str | None = None
    counted_by: CountedBy = "engine"
    rescue: Rescue | None = None


class RequestIntent(Struct, frozen=True, tag="intent", omit_defaults=True):
    """One stream that its gateway has admitted, published before the head of a good answer is sent.

    Intents travel in messages of their own: a ledger writer that does not know them yet loses nothing else.
    """

    v: int
    request_id: str  # this and what follows: see RequestRecord
    gateway_id: str
    received_unix_ms: Whole
    endpoint: str
    model: str
    key_id: str
    key_name: str
    stream: bool
    prompt_tokens: Whole
    team_id: str | None = None
    organisation_id: str | None = None


UsageRecord = RequestRecord | AttemptRecord | RequestIntent
MAX_RECORDS: Final = 1024  # of one message; gateways and workers of every release put 64 into it

_few = Meta(max_length=MAX_RECORDS)
_decoder: msgspec.msgpack.Decoder[list[UsageRecord]] = msgspec.msgpack.Decoder(Annotated[list[UsageRecord], _few])
_sealed_decoder: msgspec.msgpack.Decoder[list[msgspec.Raw]] = msgspec.msgpack.Decoder(
    Annotated[list[msgspec.Raw], _few]
)


def encode_usage(encoded_records: Sequence[bytes]) -> bytes:
    """Join records that are encoded already into one message of the USAGE stream: a msgpack array of them."""
    return encode([msgspec.Raw(record) for record in encoded_records])


class UnreadUsage(Struct, frozen=True):
    """A part of a message of the USAGE stream that this build cannot read."""

    message: bytes  # the same as a message of its own
    reason: str


def read_usage(payload: bytes) -> tuple[list[UsageRecord], list[UnreadUsage]]:
    """Return a USAGE message's records, and its parts that cannot be read: the others are not lost with them."""
    try:
        return decode_usage(payload), []
    except ProtocolError as error:
        reason = str(error)
    try:
        sealed = wire.decode(_sealed_decoder, payload)
    except ProtocolError:
        return [], [UnreadUsage(payload, reason)]
    read: list[UsageRecord] = []
    unread: list[UnreadUsage] = []
    for record in sealed:
        message = encode_usage([bytes(record)])
        try:
            read += decode_usage(message)
        except ProtocolError as error:
            unread.append(UnreadUsage(message, str(error)))
    return read, unread


def decode_usage(payload: bytes) -> list[UsageRecord]:
    """Decode a message of the USAGE stream. Raises ProtocolError."""
    return wire.decode_all(_decoder, payload)
