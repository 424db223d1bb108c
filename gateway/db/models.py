"""The tables. ``migrations/`` makes them; a test keeps both in step.

Times are integers, milliseconds since 1970 in UTC: the same on SQLite and PostgreSQL, the same as on the wire, compared
and indexed without any conversion by a driver. Days are a matter of the viewer's time zone and are made when read.
"""

from typing import ClassVar

from sqlalchemy import BigInteger, Boolean, Double, Index, MetaData, Text, text
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column


class Base(DeclarativeBase):
    """All tables. Constraint names are fixed here, so that migrations can name what they change."""

    metadata = MetaData(
        naming_convention={
            "ix": "ix_%(table_name)s_%(column_0_N_name)s",
            "uq": "uq_%(table_name)s_%(column_0_N_name)s",
            "pk": "pk_%(table_name)s",
        }
    )
    type_annotation_map: ClassVar = {int: BigInteger, str: Text, float: Double, bool: Boolean}


class ApiKeyRow(Base):
    """One API key. Rows are never deleted: a revoked key still names its past usage."""

    __tablename__ = "api_keys"
    __table_args__ = (
        # A name may be used again once its key is revoked.
        Index(
            "uq_api_keys_active_name",
            "name",
            unique=True,
            sqlite_where=text("revoked_unix_ms IS NULL"),
            postgresql_where=text("revoked_unix_ms IS NULL"),
        ),
    )

    id: Mapped[str] = mapped_column(primary_key=True)  # "key_…", random; public, and what usage rows refer to
    name: Mapped[str]  # given by the operator; unique among active keys
    token_hmac: Mapped[str] = mapped_column(unique=True)  # hex HMAC-SHA-256 of the key under the pepper
    last_four: Mapped[str]  # the key's last four characters, for people to recognise it
    created_unix_ms: Mapped[int]  # set when it was created
    revoked_unix_ms: Mapped[int | None]  # set when it was revoked; NULL: active


class RequestRow(Base):
    """One admitted request: a RequestRecord of the gateway, written once by the ledger writer.

    For a gateway that died without leaving one, the ledger writer makes it of the request's last attempt
    (``error_code`` "gateway_lost", ``http_status`` 0). A record that comes all the same takes its place.
    """

    __tablename__ = "requests"
    __table_args__ = (
        Index(None, "received_unix_ms"),
        Index(None, "model", "received_unix_ms"),
        Index(None, "key_id", "received_unix_ms"),
    )

    request_id: Mapped[str] = mapped_column(primary_key=True)  # made by the gateway; also the x-request-id header
    gateway_id: Mapped[str]  # which gateway served it
    received_unix_ms: Mapped[int]  # when its headers arrived, by the gateway's clock
    endpoint: Mapped[str]  # see protocol.messages.Origin
    model: Mapped[str]  # the configured model (aliases resolved)
    key_id: Mapped[str]  # ApiKeyRow.id
    key_name: Mapped[str]  # the key's name at that time
    stream: Mapped[bool]  # whether the caller asked for a stream
    outcome: Mapped[str]  # "ok" | "cancelled" | "failed"
    http_status: Mapped[int]  # as sent; 499 for a caller that left before the headers; 0: unknown, its gateway died
    error_code: Mapped[str | None]  # protocol.errors.ErrorCode of a failed request
    finish_reason: Mapped[str | None]  # of choice 0: "stop" | "length"
    prompt_tokens: Mapped[int]  # counted by the gateway with the model's own tokenizer
    cached_tokens: Mapped[int]  # of these, how many the engine found in its prefix cache
    completion_tokens: Mapped[int]  # over all choices
    attempts: Mapped[int]  # how many tries it took; 0: it never reached the queue
    queue_ms: Mapped[float | None]  # admission → accepted by the last attempt's worker; NULL: never accepted
    ttft_ms: Mapped[float | None]  # received → first token at the gateway; NULL: no token
    total_ms: Mapped[float]  # received → ended
    pool: Mapped[str | None]  # of the last attempt, as its worker says
    provider: Mapped[str | None]
    region: Mapped[str | None]
    # Sums over its attempts, see gateway.dispatch.attempts; NULL before version 0003, and where none was accepted.
    engine_queue_ms: Mapped[float | None]  # in an engine, before its first token began to be computed
    prefill_ms: Mapped[float | None]  # computing began → first token
    decode_ms: Mapped[float | None]  # first token → last token
    preemptions: Mapped[int | None]  # how often a choice gave way to others for want of KV memory


class AttemptRow(Base):
    """One try of a request on one worker: an AttemptRecord, written once by the ledger writer.

    Workers leave them; for one that was lost its gateway does, as far as it has seen (the first to come stays). Two
    workers may have tried the same attempt, of which the gateway heard one: the queue may deliver a message twice.
    No foreign key to ``requests``: the two records travel on their own, and an attempt usually arrives first.
    """

    __tablename__ = "attempts"
    __table_args__ = (Index(None, "started_unix_ms"),)

    request_id: Mapped[str] = mapped_column(primary_key=True)  # RequestRow.request_id
    attempt: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)  # from 1, numbered by the gateway
    worker_id: Mapped[str] = mapped_column(primary_key=True)  # who tried
    pool: Mapped[str]
    provider: Mapped[str]
    region: Mapped[str]
    tier: Mapped[str]  # "spot" | "reserved" | "on-demand" | "hosted"
    engine: Mapped[str]  # which engine adapter made the tokens
    model: Mapped[str]
    started_unix_ms: Mapped[int]  # when the worker pulled it, by the worker's clock
    outcome: Mapped[str]  # "ok" | "cancelled" | "failed"
    error_code: Mapped[str | None]  # protocol.errors.ErrorCode of a failed try
    prompt_tokens: Mapped[int]  # as the engine counts
    cached_tokens: Mapped[int]
    completion_tokens: Mapped[int]  # made by this try; tokens it resumed from are not counted again
    queue_ms: Mapped[float]  # publish → pull
    ttft_ms: Mapped[float | None]  # pull → first token; NULL: none
    total_ms: Mapped[float]  # pull → end
    usd_per_hour: Mapped[float]  # the worker's price at that time
    # The request's own, for the row of one whose gateway died (gateway.ledger.abandoned); NULL before version 0002.
    resumed_tokens: Mapped[int | None]  # output tokens that this try began with
    received_unix_ms: Mapped[int | None]
    gateway_id: Mapped[str | None]
    endpoint: Mapped[str | None]
    key_id: Mapped[str | None]
    key_name: Mapped[str | None]
    stream: Mapped[bool | None]
    # As the engine says (protocol.messages.Timings); NULL before version 0003, and where it does not say.
    engine_queue_ms: Mapped[float | None]
    prefill_ms: Mapped[float | None]
    decode_ms: Mapped[float | None]
    preemptions: Mapped[int | None]
