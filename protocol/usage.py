"""Messages of gateways and workers to the ledger in the USAGE stream: a record of each request and each attempt.

Those about refused requests are in ``protocol.refusals``.

And an intent of each stream, stored before anything is sent to its client: what the ledger makes the request's row of,
should its gateway not live to leave the record. The record of a whole answer is itself stored before that.
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

MAX_TAGS: Final = 16  # of one request; these three are the bounds of OpenAI's `metadata`
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
    """Return tags as SQL keeps them: JSON, the same for the same tags; None where there are none."""
    return msgspec.json.encode(dict(sorted(tags.items()))).decode() if tags else None


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
    engine_queue_ms: Real | None = None  # this and what follows: sums over its attempts (gateway.dispatch.attempt)
    prefill_ms: Real | None = None
    decode_ms: Real | None = None
    preemptions: Whole | None = None
    team_id: str | None = None
    organisation_id: str | None = None
    tier: str | None = None  # of the last attempt's pool
    counted_by: CountedBy = "engine"  # "provider": as a hosted API says; "estimate": in parts, as none has said
    tags: Tags | None = None  # the caller's own


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
    tags: Tags | None = None


UsageRecord = RequestRecord | AttemptRecord | RequestIntent | RefusalCount | RefusalRecord
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


# --- dead letters -----------------------------------------------------------------------------------------------------
#
# The end of the road: the story of a request that was given up, from its gateway to the DLQ stream.


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


_dead_letter_decoder = msgspec.msgpack.Decoder(DeadLetter)


def decode_dead_letter(payload: bytes) -> DeadLetter:
    """Decode a DeadLetter. Raises ProtocolError."""
    return wire.decode_versioned(_dead_letter_decoder, payload)


# --- parked -----------------------------------------------------------------------------------------------------------
#
# Usage records that a ledger writer could not take, in the PARKED stream: nothing that cost something is thrown away.
#
# USAGE ──not understood, or refused by the database──> PARKED ──by a build that understands, or by hand──> USAGE

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


_parked_decoder = msgspec.msgpack.Decoder(ParkedUsage)


def decode_parked(payload: bytes) -> ParkedUsage:
    """Decode a ParkedUsage. Raises ProtocolError."""
    return wire.decode_versioned(_parked_decoder, payload, "parked record")


# --- open requests ----------------------------------------------------------------------------------------------------
#
# Messages by which the ledger learns which of the requests without a record still run.
#
#     ledger writer ──OpenRequestsQuery (request)──> gateway     core NATS, ``subjects.open_requests_subject``
#     ledger writer <──StillOpen (reply)── gateway
#
# A gateway that has died answers nothing: the queue server itself says at once that nobody listens there.

MAX_ASKED: Final = 1000  # requests in one question


class OpenRequestsQuery(Struct, frozen=True, array_like=True):
    """Say which of these requests you still have."""

    request_ids: tuple[str, ...]


class StillOpen(Struct, frozen=True, array_like=True):
    """Those that run, or whose records are not stored yet."""

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
# Messages of gateways to the ledger in the PAYLOADS stream: requests and answers, of clients that agreed to it.


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


_payload_decoder: msgspec.msgpack.Decoder[list[PayloadRecord]] = msgspec.msgpack.Decoder(list[PayloadRecord])
_sealed_payload_decoder: msgspec.msgpack.Decoder[list[msgspec.Raw]] = msgspec.msgpack.Decoder(list[msgspec.Raw])


def encode_payloads(records: Sequence[PayloadRecord]) -> bytes:
    """Make one message of the PAYLOADS stream: a msgpack array of records."""
    return encode(list(records))


def decode_payloads(message: bytes) -> list[PayloadRecord]:
    """Decode a message of the PAYLOADS stream. Raises ProtocolError."""
    return wire.decode_all(_payload_decoder, message)


def read_payloads(message: bytes) -> tuple[list[PayloadRecord], list[str]]:
    """Return a message's records, and why others cannot be read: one takes no other along.

    Raises NewerVersion for a message of a newer release, and ProtocolError for one that holds no list.
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
