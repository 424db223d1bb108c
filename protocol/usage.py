"""Messages of gateways and workers to the ledger in the USAGE stream: a record of each request and attempt.

An intent of each stream is stored before anything is sent to its client. If the gateway dies before it publishes the
record, the ledger makes the row from the intent. A whole answer has no intent: its record is stored before it is sent.

``protocol.refusals`` has the messages about refused requests.
"""

from collections.abc import Mapping, Sequence
from typing import Annotated, Final

import msgspec
from msgspec import Meta, Struct
from msgspec.structs import replace

from protocol import wire
from protocol.errors import NewerVersion, ProtocolError
from protocol.job import CountedBy, Rescue, Sampling, encode
from protocol.refusals import RefusalCount, RefusalRecord
from protocol.wire import Real, Whole

MAX_TAGS: Final = 16  # of one request; this and the next two are the bounds of OpenAI's `metadata`
MAX_TAG_NAME_CHARS: Final = 64
MAX_TAG_VALUE_CHARS: Final = 512

Tags = Annotated[
    dict[
        Annotated[str, Meta(max_length=MAX_TAG_NAME_CHARS)],
        Annotated[str, Meta(max_length=MAX_TAG_VALUE_CHARS)],
    ],
    Meta(max_length=MAX_TAGS),
]


def tags_text(tags: Mapping[str, str] | None) -> str | None:
    """Return tags as canonical JSON for SQL; None if there are none."""
    return msgspec.json.encode(dict(sorted(tags.items()))).decode() if tags else None


class RequestRecord(Struct, frozen=True, tag="request", omit_defaults=True):
    """One admitted request, published once by its gateway when it has ended, with any outcome."""

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
    http_status: Whole  # as sent or about to be sent; 499 if the client left before the headers
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
    engine_queue_ms: Real | None = None  # this and the following: sums over its attempts (gateway.dispatch.attempt)
    prefill_ms: Real | None = None
    decode_ms: Real | None = None
    preemptions: Whole | None = None
    team_id: str | None = None
    organisation_id: str | None = None
    tier: str | None = None  # of the last attempt's pool
    # "provider": reported by a hosted API; "estimate": for answers in parts without reported counts.
    counted_by: CountedBy = "engine"
    tags: Tags | None = None  # the client's


class AttemptRecord(Struct, frozen=True, tag="attempt", omit_defaults=True):
    """One attempt of one request, published by its worker when the attempt has ended.

    For a lost worker, the gateway publishes a record of what it saw; the ledger keeps the first record that arrives.
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
    resumed_tokens: Whole = 0  # output tokens that it resumed from, over all choices
    received_unix_ms: Whole = 0  # when the gateway received the request
    gateway_id: str | None = None  # this and the following: from its Origin
    endpoint: str | None = None
    key_id: str | None = None
    key_name: str | None = None
    stream: bool | None = None
    engine_queue_ms: Real | None = None  # this and the following: see Timings; None: unknown
    prefill_ms: Real | None = None
    decode_ms: Real | None = None
    preemptions: Whole | None = None
    team_id: str | None = None
    organisation_id: str | None = None
    counted_by: CountedBy = "engine"
    rescue: Rescue | None = None


class RequestIntent(Struct, frozen=True, tag="intent", omit_defaults=True):
    """One admitted stream, published by its gateway before the head of a good answer is sent.

    Intents have separate messages, so that a ledger writer that does not support them loses nothing else.
    """

    v: int
    request_id: str  # this and the following: see RequestRecord
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
    tags: Tags | None = None


UsageRecord = RequestRecord | AttemptRecord | RequestIntent | RefusalCount | RefusalRecord
MAX_RECORDS: Final = 1024  # of one message; gateways and workers of all releases send at most 64

_few = Meta(max_length=MAX_RECORDS)
_decoder: msgspec.msgpack.Decoder[list[UsageRecord]] = msgspec.msgpack.Decoder(Annotated[list[UsageRecord], _few])
_sealed_decoder: msgspec.msgpack.Decoder[list[msgspec.Raw]] = msgspec.msgpack.Decoder(
    Annotated[list[msgspec.Raw], _few]
)


def encode_usage(encoded_records: Sequence[bytes]) -> bytes:
    """Join encoded records into one message of the USAGE stream: a msgpack array."""
    return encode([msgspec.Raw(record) for record in encoded_records])


class UnreadUsage(Struct, frozen=True):
    """An unreadable part of a message of the USAGE stream."""

    message: bytes  # the part as a separate message
    reason: str


def read_usage(payload: bytes) -> tuple[list[UsageRecord], list[UnreadUsage]]:
    """Return a USAGE message's readable records and its unreadable parts."""
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


# --- dead letters -----------------------------------------------------------------------------------------------------
#
# The record of a request that was given up, from its gateway to the DLQ stream.


class AttemptFailure(Struct, frozen=True, omit_defaults=True):
    """Why one attempt failed, as seen by its gateway."""

    attempt: int
    worker_id: str | None  # None: no worker had accepted it
    code: str  # protocol.errors.ErrorCode
    reason: str
    completion_tokens: int  # of this attempt, received by the gateway


class DeadLetter(Struct, frozen=True, omit_defaults=True):
    """A request that was given up after its last attempt, without the client's texts, which would require consent."""

    v: int
    request_id: str
    gateway_id: str
    model: str
    tenant: str
    key_id: str
    prompt_tokens: int
    sampling: Sampling  # without the client's texts: see sampling_without_texts
    accepted_unix_ms: int
    given_up_unix_ms: int
    failures: tuple[AttemptFailure, ...]
    withheld_bytes: dict[str, int] = {}  # encoded size of the fields omitted from ``sampling``
    grammar_sha256: str = ""  # identifies a grammar that kills workers; "": none


_CALLERS_OWN: Final = ("stop", "bad_words", "logit_bias", "stop_token_ids", "allowed_token_ids")


def sampling_without_texts(sampling: Sampling) -> tuple[Sampling, dict[str, int]]:
    """Remove the client's texts; return the rest, and the size of each removed field."""
    withheld = {name: len(encode(getattr(sampling, name))) for name in _CALLERS_OWN if getattr(sampling, name)}
    grammar = sampling.grammar
    if grammar is not None and grammar.source:
        withheld["grammar"] = len(grammar.source.encode())
        grammar = replace(grammar, source="")
    empty = {name: type(getattr(sampling, name))() for name in withheld if name != "grammar"}
    return replace(sampling, grammar=grammar, **empty), withheld


_dead_letter_decoder = msgspec.msgpack.Decoder(DeadLetter)


def decode_dead_letter(payload: bytes) -> DeadLetter:
    """Decode a DeadLetter. Raises ProtocolError."""
    return wire.decode_versioned(_dead_letter_decoder, payload)


# --- parked -----------------------------------------------------------------------------------------------------------
#
# Usage records that a ledger writer could not store, in the PARKED stream, so that no charge is lost.
#
# USAGE ──unreadable, or refused by the database──> PARKED ──by a build that can read it, or by hand──> USAGE

MAX_REASON_CHARS: Final = 500
MAX_MESSAGE_BYTES: Final = 1024 * 1024  # kept of one message; gateways and workers send at most a quarter of this


class ParkedUsage(Struct, frozen=True, omit_defaults=True):
    """One parked record, unchanged."""

    v: int
    message: bytes  # of the USAGE stream, with only this record, or unreadable as a whole
    reason: str
    parked_unix_ms: int
    is_refused: bool = False  # by the database: readable, but an operator must decide
    subject: str = ""  # on which it arrived, which identifies the sender; empty: parked by an older release


_parked_decoder = msgspec.msgpack.Decoder(ParkedUsage)


def decode_parked(payload: bytes) -> ParkedUsage:
    """Decode a ParkedUsage. Raises ProtocolError."""
    return wire.decode_versioned(_parked_decoder, payload, "parked record")


# --- open requests ----------------------------------------------------------------------------------------------------
#
# Messages by which the ledger checks which requests without a record are still open.
#
#     ledger writer ──OpenRequestsQuery (request)──> gateway     core NATS, ``subjects.open_requests_subject``
#     ledger writer <──StillOpen (reply)── gateway
#
# For a dead gateway the queue server replies "no responders" at once.

MAX_ASKED: Final = 1000  # requests in one query


class OpenRequestsQuery(Struct, frozen=True, array_like=True):
    """A query for which of these requests are still open."""

    request_ids: tuple[str, ...]


class StillOpen(Struct, frozen=True, array_like=True):
    """The requests that run, or whose records are not stored yet."""

    completion_tokens: dict[str, Whole]  # by request: output tokens so far, over all choices


_ask_decoder = msgspec.msgpack.Decoder(OpenRequestsQuery)
_answer_decoder = msgspec.msgpack.Decoder(StillOpen)


def decode_open_requests_query(payload: bytes) -> OpenRequestsQuery:
    """Decode an OpenRequestsQuery. Raises ProtocolError."""
    return wire.decode(_ask_decoder, payload, "question")


def decode_still_open(payload: bytes) -> StillOpen:
    """Decode a StillOpen. Raises ProtocolError."""
    return wire.decode(_answer_decoder, payload, "answer")


# --- payloads ---------------------------------------------------------------------------------------------------------
#
# Messages of gateways to the ledger in the PAYLOADS stream: requests and answers of clients that agreed to it.


class PayloadRecord(Struct, frozen=True, omit_defaults=True):
    """One answered request with its answer, published once, compressed and, with a key, encrypted."""

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
    encoding: str  # of request and answer (ledger.payloads.sealing)
    dropped: bool = False  # not permitted, or too large: request and answer are omitted
    request: bytes | None = None
    answer: bytes | None = None


_payload_decoder: msgspec.msgpack.Decoder[list[PayloadRecord]] = msgspec.msgpack.Decoder(list[PayloadRecord])
_sealed_payload_decoder: msgspec.msgpack.Decoder[list[msgspec.Raw]] = msgspec.msgpack.Decoder(list[msgspec.Raw])


def encode_payloads(records: Sequence[PayloadRecord]) -> bytes:
    """Encode records as one message of the PAYLOADS stream: a msgpack array."""
    return encode(list(records))


def decode_payloads(message: bytes) -> list[PayloadRecord]:
    """Decode a message of the PAYLOADS stream. Raises ProtocolError."""
    return wire.decode_all(_payload_decoder, message)


def read_payloads(message: bytes) -> tuple[list[PayloadRecord], list[str]]:
    """Return a message's readable records, and the errors of unreadable ones.

    Raises NewerVersion for a message of a newer release, and ProtocolError for one that is not a list.
    """
    try:
        return decode_payloads(message), []
    except NewerVersion:
        raise
    except ProtocolError:
        sealed = wire.decode(_sealed_payload_decoder, message)
    records: list[PayloadRecord] = []
    reasons: list[str] = []
    for record in sealed:
        try:
            records += decode_payloads(encode([record]))
        except ProtocolError as error:
            reasons.append(str(error))
    return records, reasons
