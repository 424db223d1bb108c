"""The tables. ``migrations/`` creates them; a test keeps both in sync.

Times are integers, milliseconds since 1970 in UTC: the same on SQLite, on PostgreSQL and on the wire, compared and
indexed without conversion by a driver. Days depend on the viewer's time zone and are computed when read.
"""

import json
from typing import ClassVar

from msgspec import Struct
from sqlalchemy import BigInteger, Boolean, Dialect, Double, Index, LargeBinary, MetaData, Text, TypeDecorator, text
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column


class Base(DeclarativeBase):
    """The base of all tables. Fixes constraint names, so that migrations can refer to them."""

    metadata = MetaData(
        naming_convention={
            "ix": "ix_%(table_name)s_%(column_0_N_name)s",
            "uq": "uq_%(table_name)s_%(column_0_N_name)s",
            "pk": "pk_%(table_name)s",
        }
    )
    type_annotation_map: ClassVar = {int: BigInteger, str: Text, float: Double, bool: Boolean, bytes: LargeBinary}


class WordList(TypeDecorator[tuple[str, ...]]):
    """A short list of words, stored as JSON. Only Python reads and compares it."""

    impl = Text
    cache_ok = True

    def process_bind_param(self, value: tuple[str, ...] | None, dialect: Dialect) -> str | None:  # noqa: ARG002
        """Encode the list."""
        return None if value is None else json.dumps(value)

    def process_result_value(self, value: str | None, dialect: Dialect) -> tuple[str, ...] | None:  # noqa: ARG002
        """Decode the list."""
        return None if value is None else tuple(json.loads(value))


class _Policy:
    """Limits and consents of a team (for all its keys together) or of a key (in addition to its team's).

    NULL: not set. For a key, the team's value then applies.
    """

    requests_per_minute: Mapped[int | None]
    tokens_per_minute: Mapped[int | None]  # prompt and completion
    max_concurrent: Mapped[int | None]  # requests admitted and not yet ended
    budget_nano_usd: Mapped[int | None]  # per budget_period
    budget_period: Mapped[str | None]  # "day" | "week" | "month" (UTC) | "total"
    weight: Mapped[float | None]  # share of the workers, against other tenants'; NULL: 1
    priority: Mapped[
        str | None
    ]  # "interactive" | "batch": the highest priority that its requests can have; NULL: interactive
    log_payload: Mapped[bool | None]  # consent to store prompts and answers; NULL: no
    train_ok: Mapped[bool | None]  # consent to build training sets from them; NULL: no
    redact: Mapped[bool | None]  # redact personal data before they are stored; NULL: yes
    retention_days: Mapped[int | None]  # how long they are kept; NULL: the ledger's default
    # The hosted APIs that its prompts may be sent to (db.accounts.principal); NULL: unspecified, empty: none.
    allow_hosted: Mapped[tuple[str, ...] | None] = mapped_column(WordList)
    trusted_only: Mapped[
        bool | None
    ]  # requests go only to trusted pools; NULL: no. A team's setting applies to all its keys


class OrganisationRow(Base):
    """An organization, the owner of teams. Every team belongs to one; the migration creates the first."""

    __tablename__ = "organisations"

    id: Mapped[str] = mapped_column(primary_key=True)  # "org_…"
    name: Mapped[str] = mapped_column(unique=True)
    created_unix_ms: Mapped[int]


class TeamRow(_Policy, Base):
    """Keys that share limits and are one tenant. Every key belongs to a team; the migration creates the first."""

    __tablename__ = "teams"

    id: Mapped[str] = mapped_column(primary_key=True)  # "team_…"; the tenant of its requests
    organisation_id: Mapped[str]  # OrganisationRow.id
    name: Mapped[str] = mapped_column(unique=True)
    created_unix_ms: Mapped[int]


class ApiKeyRow(_Policy, Base):
    """One API key. Rows are never deleted: a revoked key still names its past usage."""

    __tablename__ = "api_keys"
    __table_args__ = (
        # The name of a revoked key can be reused.
        Index(
            "uq_api_keys_active_name",
            "name",
            unique=True,
            sqlite_where=text("revoked_unix_ms IS NULL"),
            postgresql_where=text("revoked_unix_ms IS NULL"),
        ),
    )

    id: Mapped[str] = mapped_column(primary_key=True)  # "key_…", random; public, and used in usage rows
    name: Mapped[str]  # given by the operator; unique among active keys
    token_hmac: Mapped[str] = mapped_column(unique=True)  # hex HMAC-SHA-256 of the key under the pepper
    last_four: Mapped[str]  # the key's last four characters, for people to recognize it
    created_by: Mapped[str | None]  # an actor as in AuditRow; NULL: created by an older release
    created_unix_ms: Mapped[int]  # set when it was created
    revoked_unix_ms: Mapped[int | None]  # set when it was revoked; NULL: active
    stops_running: Mapped[bool | None]  # set on revocation: running requests are canceled, too
    team_id: Mapped[str]  # TeamRow.id
    scopes: Mapped[str]  # from db.accounts.principal.SCOPES, separated by spaces
    models: Mapped[str | None]  # JSON list of the models that it may use; NULL: all
    expires_unix_ms: Mapped[int | None]  # invalid from then on; NULL: never
    # After a rotation the previous token stays valid for a while.
    previous_hmac: Mapped[str | None] = mapped_column(unique=True)
    previous_until_unix_ms: Mapped[int | None]


class AuditRow(Base):
    """One change to organizations, teams, keys or prices, with its actor. Spillway never changes or deletes it."""

    __tablename__ = "audit_log"
    __table_args__ = (Index(None, "at_unix_ms"),)

    id: Mapped[str] = mapped_column(primary_key=True)  # "aud_…"
    at_unix_ms: Mapped[int]
    actor: Mapped[str]  # "key:key_…", "user:…" of a login, or "cli:…" of the operating system
    action: Mapped[str]  # "key.create", "team.update", …
    subject_id: Mapped[str]  # of the changed object
    before: Mapped[str | None]  # JSON of the changed fields; NULL: the object did not exist. Never a secret.
    after: Mapped[str | None]


class AdminRow(Base):
    """A user with a local password for the pages."""

    __tablename__ = "admins"

    name: Mapped[str] = mapped_column(primary_key=True)
    password_hash: Mapped[str]  # see console.login.passwords
    changed_unix_ms: Mapped[int]


class SessionRow(Base):
    """One login to the pages, until it expires, the user logs out, or the password changes."""

    __tablename__ = "sessions"

    token_hmac: Mapped[str] = mapped_column(primary_key=True)  # hex HMAC-SHA-256 of the cookie under the pepper
    user_name: Mapped[str]  # AdminRow.name, or the address verified by the OIDC issuer
    started_unix_ms: Mapped[int]
    ends_unix_ms: Mapped[int]
    # The next four are NULL for sessions of an older release. Such sessions have no role and end.
    role: Mapped[str | None]  # from db.accounts.roles.ROLES
    teams: Mapped[str | None]  # JSON of team roles: team id → role
    address: Mapped[str | None]  # of the browser, as reported by trusted proxies
    browser: Mapped[str | None]  # its User-Agent


class RequestRow(Base):
    """One admitted request: a RequestRecord of the gateway, written once by the ledger writer.

    On PostgreSQL it is partitioned by day and received_unix_ms is part of its key (ledger.partitions). For a gateway
    that died without publishing the record, the ledger writer builds the row from the intent and the last attempt
    (``error_code`` "gateway_lost", ``http_status`` 0). A record that arrives later replaces it.
    """

    __tablename__ = "requests"
    __table_args__ = (
        Index(None, "received_unix_ms"),
        Index(None, "model", "received_unix_ms"),
        Index(None, "key_id", "received_unix_ms"),
    )

    request_id: Mapped[str] = mapped_column(primary_key=True)  # created by the gateway; also the x-request-id header
    gateway_id: Mapped[str]  # which gateway served it
    received_unix_ms: Mapped[int]  # when its headers arrived, by the gateway's clock
    endpoint: Mapped[str]  # see protocol.job.Origin
    model: Mapped[str]  # the configured model (aliases resolved)
    key_id: Mapped[str]  # ApiKeyRow.id
    key_name: Mapped[str]  # the key's name at that time
    stream: Mapped[bool]  # whether the client asked for a stream
    outcome: Mapped[str]  # "ok" | "cancelled" | "failed"
    http_status: Mapped[int]  # as sent; 499 if the client disconnected before the headers; 0: unknown, gateway died
    error_code: Mapped[str | None]  # protocol.errors.ErrorCode of a failed request
    finish_reason: Mapped[str | None]  # of choice 0: "stop" | "length"
    prompt_tokens: Mapped[int]  # counted by the gateway with the model's own tokenizer
    cached_tokens: Mapped[int]  # prompt tokens that the engine found in its prefix cache
    completion_tokens: Mapped[int]  # over all choices
    attempts: Mapped[int]  # 0: the request never reached the queue
    queue_ms: Mapped[float | None]  # admission → accepted by the last attempt's worker; NULL: never accepted
    ttft_ms: Mapped[float | None]  # received → first token at the gateway; NULL: no token
    total_ms: Mapped[float]  # received → ended
    pool: Mapped[str | None]  # of the last attempt, as reported by its worker
    provider: Mapped[str | None]
    region: Mapped[str | None]
    # Sums over its attempts, see gateway.dispatch.attempt; NULL before version 0003, and if no attempt was accepted.
    engine_queue_ms: Mapped[float | None]  # in an engine, before the computation of its first token began
    prefill_ms: Mapped[float | None]  # computing began → first token
    decode_ms: Mapped[float | None]  # first token → last token
    preemptions: Mapped[int | None]  # how often a choice was preempted for lack of KV memory
    team_id: Mapped[str | None]  # TeamRow.id, of the key at that time; NULL: its gateway was older than version 0006
    organisation_id: Mapped[str | None]  # OrganisationRow.id, likewise
    tier: Mapped[str | None]  # of the last attempt's pool, as reported by its worker; NULL: never accepted
    counted_by: Mapped[str | None]  # protocol.job.CountedBy; NULL: an engine, before version 0011
    # By the prices at the time of the request (db.prices); NULL: the model has no price.
    charge_nano_usd: Mapped[int | None]
    tags: Mapped[str | None]  # JSON object of the client's tags, name → value; NULL: none, or before version 0020


class AttemptRow(Base):
    """One try of a request on one worker: an AttemptRecord, written once by the ledger writer.

    The worker publishes it. For a lost worker, the gateway publishes what it knows. The first record to arrive is kept.
    The queue may deliver a job twice: two workers may have run the same attempt, of which the gateway accepted one.
    No foreign key to ``requests``: the two records travel separately, and an attempt usually arrives first.
    Partitioned like ``requests``, by the time its request was received.
    """

    __tablename__ = "attempts"
    __table_args__ = (Index(None, "started_unix_ms"),)

    request_id: Mapped[str] = mapped_column(primary_key=True)  # RequestRow.request_id
    attempt: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)  # from 1, numbered by the gateway
    worker_id: Mapped[str] = mapped_column(primary_key=True)
    pool: Mapped[str]
    provider: Mapped[str]
    region: Mapped[str]
    tier: Mapped[str]  # "spot" | "reserved" | "on-demand" | "hosted"
    engine: Mapped[str]  # the engine adapter that generated the tokens
    model: Mapped[str]
    started_unix_ms: Mapped[int]  # when the worker pulled it, by the worker's clock
    outcome: Mapped[str]  # "ok" | "cancelled" | "failed"
    error_code: Mapped[str | None]  # protocol.errors.ErrorCode of a failed try
    prompt_tokens: Mapped[int]  # as counted by the engine
    cached_tokens: Mapped[int]
    completion_tokens: Mapped[int]  # generated by this try, without the tokens it resumed from
    queue_ms: Mapped[float]  # publish → pull
    ttft_ms: Mapped[float | None]  # pull → first token; NULL: none
    total_ms: Mapped[float]  # pull → end
    usd_per_hour: Mapped[float]  # the worker's price at that time
    # Fields of the request, for its row if the gateway died (ledger.abandoned); NULL before version 0002.
    resumed_tokens: Mapped[int | None]  # output tokens of earlier attempts that this one continued from
    received_unix_ms: Mapped[int]  # before version 0002: as started_unix_ms
    gateway_id: Mapped[str | None]
    endpoint: Mapped[str | None]
    key_id: Mapped[str | None]
    key_name: Mapped[str | None]
    stream: Mapped[bool | None]
    # Reported by the engine (protocol.job.Timings); NULL before version 0003, and if the engine does not report them.
    engine_queue_ms: Mapped[float | None]
    prefill_ms: Mapped[float | None]
    decode_ms: Mapped[float | None]
    preemptions: Mapped[int | None]
    team_id: Mapped[str | None]  # of its request; NULL before version 0006
    organisation_id: Mapped[str | None]
    counted_by: Mapped[str | None]  # protocol.job.CountedBy; NULL: an engine, before version 0011
    rescue: Mapped[str | None]  # protocol.job.Rescue: how it continued earlier tries; NULL: the first


class OpenRequestRow(Base):
    """A RequestIntent whose record has not arrived for some seconds, until its request has a row (ledger.abandoned)."""

    __tablename__ = "open_requests"

    request_id: Mapped[str] = mapped_column(primary_key=True)  # this and the following columns: as in ``requests``
    gateway_id: Mapped[str]
    received_unix_ms: Mapped[int]
    endpoint: Mapped[str]
    model: Mapped[str]
    key_id: Mapped[str]
    key_name: Mapped[str]
    stream: Mapped[bool]
    prompt_tokens: Mapped[int]
    completion_tokens: Mapped[int]  # as the gateway last reported
    team_id: Mapped[str | None]
    organisation_id: Mapped[str | None]
    tags: Mapped[str | None]


class SliceRow(Base):
    """One combination of values of the rollups' dimensions; NULL is "" here. There are few; they are never deleted."""

    __tablename__ = "slices"

    id: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)  # ledger.rollups.slice_id
    model: Mapped[str]
    pool: Mapped[str]  # of the last attempt, like provider, region and tier
    provider: Mapped[str]
    region: Mapped[str]
    tier: Mapped[str]
    team_id: Mapped[str]
    key_id: Mapped[str]
    endpoint: Mapped[str]
    outcome: Mapped[str]


class _Bucket:
    """One slice in one time span, by when its requests were received."""

    width_s: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)  # ledger.rollups.WIDTHS_S
    bucket_unix_ms: Mapped[int] = mapped_column(
        primary_key=True, autoincrement=False
    )  # start of the bucket; a multiple of its width
    slice_id: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)  # SliceRow.id


class RollupRow(_Bucket, Base):
    """Sums over the requests of one slice. Written only in the transaction that writes those requests.

    Every request counts in one row per width. Widths above 15 minutes keep the number of rows of a month small. Widths
    of 15 minutes keep days exact in time zones such as UTC+5:45. Minutes are kept for some hours.
    """

    __tablename__ = "rollups"
    __table_args__ = ({"sqlite_with_rowid": False},)  # stored and read in the order of its key

    requests: Mapped[int]
    attempts: Mapped[int]
    failovers: Mapped[int]  # attempts after the first
    retried: Mapped[int]  # requests that took more than one attempt
    prompt_tokens: Mapped[int]
    cached_tokens: Mapped[int]
    completion_tokens: Mapped[int]
    charge_nano_usd: Mapped[int]  # of the requests that have a price
    total_ms: Mapped[int]  # sum of the end-to-end latencies, each rounded; by Little's law, concurrency x time
    # Tokens of requests without a price. If not 0, the charge is incomplete.
    unpriced_tokens: Mapped[int] = mapped_column(server_default="0")


class HistogramRow(_Bucket, Base):
    """Distributions of six measures over the requests of one slice (format: ledger.histogram). NULL: no values."""

    __tablename__ = "histograms"
    __table_args__ = ({"sqlite_with_rowid": False},)

    queue_ms: Mapped[bytes | None]  # as in ``requests``, like TTFT and total
    ttft_ms: Mapped[bytes | None]
    tpot_ms: Mapped[bytes | None]  # (total - TTFT) / (completion tokens - 1), of answered requests with at least two
    total_ms: Mapped[bytes | None]
    prompt_tokens: Mapped[bytes | None]
    completion_tokens: Mapped[bytes | None]


class TagSliceRow(Base):
    """One tag of a key's requests. Limited in number per key (ledger.tags), and never deleted."""

    __tablename__ = "tag_slices"
    __table_args__ = (Index(None, "key_id"),)

    id: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)  # ledger.rollups.slice_id
    team_id: Mapped[str]
    key_id: Mapped[str]
    name: Mapped[str]
    value: Mapped[str]


class TagRollupRow(_Bucket, Base):
    """Sums over the requests with one tag, as in ``rollups``. A request counts once for each of its tags."""

    __tablename__ = "tag_rollups"
    __table_args__ = ({"sqlite_with_rowid": False},)

    requests: Mapped[int]
    prompt_tokens: Mapped[int]
    cached_tokens: Mapped[int]
    completion_tokens: Mapped[int]
    charge_nano_usd: Mapped[int]
    unpriced_tokens: Mapped[int]


class PriceRow(Base):
    """A price and its start. It holds until the next row of the same model and pool. Rows are only added.

    model set, pool empty: the charge to clients for the model's tokens. Both set: the charge of the pool's provider to
    us (hosted APIs). Only pool set: the cost of one machine of the pool. NULL: no such price; all NULL: it has ended.
    """

    __tablename__ = "price_book"

    model: Mapped[str] = mapped_column(primary_key=True)  # empty: of the pool's machines
    pool: Mapped[str] = mapped_column(primary_key=True)  # empty: the charge to clients
    from_unix_ms: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    source: Mapped[str] = mapped_column()  # "config", or an actor of the audit log
    # Nano-USD per million tokens: 0.15 USD is 150,000,000. Cached tokens are part of the prompt tokens.
    prompt_nano_usd: Mapped[int | None]
    cached_nano_usd: Mapped[int | None]  # NULL: like other prompt tokens
    completion_nano_usd: Mapped[int | None]
    machine_nano_usd: Mapped[int | None]  # for an hour of one machine
    on_demand_nano_usd: Mapped[int | None]  # the cost of that hour on demand; NULL: unknown


class InstanceRow(Base):
    """A quarter of an hour of one worker: when it was up, and how long it was busy.

    Computed from heartbeats as minimum and maximum, so that several ledger writers agree. A writer that was down adds
    the time that it missed. Up time = up_until - up_from, busy time = busy_until - busy_from.
    """

    __tablename__ = "instance_seconds"

    bucket_unix_ms: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    worker_id: Mapped[str] = mapped_column(primary_key=True)  # one process of a worker, never reused
    pool: Mapped[str]
    provider: Mapped[str]
    region: Mapped[str]
    tier: Mapped[str]
    up_from_unix_ms: Mapped[int]
    up_until_unix_ms: Mapped[int]
    busy_from_ms: Mapped[int]  # since the worker started: time with at least one job, at up_from
    busy_until_ms: Mapped[int]  # and at up_until
    nano_usd_per_hour: Mapped[int]  # of its machine at that time
    on_demand_nano_usd_per_hour: Mapped[int | None]  # its cost on demand; NULL: unknown


class PayloadRow(Base):
    """Request and answer, stored if the key's or team's consent allowed it at the time of the request."""

    __tablename__ = "payloads"
    __table_args__ = (
        Index(None, "expires_unix_ms"),
        Index(None, "key_id", "received_unix_ms"),
        Index(None, "end_user"),
    )

    request_id: Mapped[str] = mapped_column(primary_key=True)  # RequestRow.request_id
    received_unix_ms: Mapped[int]
    model: Mapped[str]
    endpoint: Mapped[str]
    key_id: Mapped[str]
    team_id: Mapped[str]
    end_user: Mapped[str | None]  # as named by the client: the request's ``user``
    train_ok: Mapped[bool]  # whether training sets may be built from it
    redacted: Mapped[bool]  # whether personal data were stripped (ledger.payloads.redaction)
    expires_unix_ms: Mapped[int]  # deleted soon after
    dropped: Mapped[bool]  # larger than the limit, or not redactable: request and answer are NULL
    encoding: Mapped[str]  # "zlib", or with a cipher and its key's id, as ledger.payloads.sealing has it
    request: Mapped[bytes | None]  # JSON: the body as it was validated
    answer: Mapped[bytes | None]  # JSON: {"choices": […]} as they would be without streaming and logprobs


class SetAsideRow(Base):
    """An item that failed repeatedly or cannot be decoded, and is not retried."""

    __tablename__ = "set_aside"
    __table_args__ = (Index(None, "kind", "at_unix_ms"), Index(None, "at_unix_ms"))

    kind: Mapped[str] = mapped_column(primary_key=True)  # db.set_aside.Kind
    item: Mapped[str] = mapped_column(primary_key=True)  # an id, or a position in a stream
    owner: Mapped[str]  # the tenant or worker that it came from; empty: unknown
    reason: Mapped[str]
    at_unix_ms: Mapped[int]


# --- refusals ---------------------------------------------------------------------------------------------------------
#
# Tables of refused requests: counts, and the latest requests.


class RefusalRow(Base):
    """One request that was refused before it was admitted (protocol.refusals.RefusalRecord); the latest of each key."""

    __tablename__ = "refusals"
    __table_args__ = (Index(None, "key_id", "received_unix_ms"), Index(None, "received_unix_ms"))

    request_id: Mapped[str] = mapped_column(primary_key=True)
    gateway_id: Mapped[str]
    received_unix_ms: Mapped[int]
    endpoint: Mapped[str]
    code: Mapped[str]
    status: Mapped[int]
    method: Mapped[str]
    path: Mapped[str]
    client: Mapped[str]
    message: Mapped[str | None]
    param: Mapped[str | None]
    model: Mapped[str | None]  # canonical name; for an unknown model, the client's text
    key_id: Mapped[str]  # "": no key or an unknown key
    key_name: Mapped[str]
    team_id: Mapped[str]
    organisation_id: Mapped[str]


class RefusalGroupRow(Base):
    """One combination of the dimensions of refusal counts; "" is unknown. There are few; they are never deleted."""

    __tablename__ = "refusal_groups"

    id: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)  # of its values, as SliceRow's
    code: Mapped[str]
    status: Mapped[int]
    endpoint: Mapped[str]
    key_id: Mapped[str]
    team_id: Mapped[str]
    model: Mapped[str]  # its canonical name


class RefusalCountRow(Base):
    """The refusals of one group in one minute, counted by one gateway process.

    Counts of earlier days are merged into quarters of an hour (ledger.refusals).
    """

    __tablename__ = "refusal_counts"
    __table_args__ = ({"sqlite_with_rowid": False},)

    bucket_unix_ms: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)  # start of the bucket
    run_id: Mapped[str] = mapped_column(primary_key=True)  # of the process; "": merged
    group_id: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)  # RefusalGroupRow.id
    refusals: Mapped[int]


# --- files and batches ------------------------------------------------------------------------------------------------
#
# Tables of files and batches.


class FileRow(Base):
    """A file, complete or being uploaded. Its parts hold its bytes in order."""

    __tablename__ = "files"
    __table_args__ = (Index(None, "tenant", "created_unix_ms"), Index(None, "expires_unix_ms"))

    id: Mapped[str] = mapped_column(primary_key=True)  # "file-…"
    tenant: Mapped[str]  # db.accounts.principal.Principal.tenant, which can see it
    key_id: Mapped[str]  # ApiKeyRow.id of its creator
    created_unix_ms: Mapped[int]
    expires_unix_ms: Mapped[int]  # deleted soon after
    purpose: Mapped[str]  # "batch": uploaded by a client; "batch_output"; "uploading": not complete yet
    filename: Mapped[str]
    size_bytes: Mapped[int]


class FilePartRow(Base):
    """A part of a file's bytes, with the numbers of the batch lines that it answers, committed atomically.

    Parts of a batch's results exist before their file.
    """

    __tablename__ = "file_parts"

    file_id: Mapped[str] = mapped_column(primary_key=True)  # FileRow.id, which may not exist yet
    number: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    object_name: Mapped[str]  # in the storage (gateway.batches.storage)
    size_bytes: Mapped[int]
    lines: Mapped[bytes | None]  # line numbers (gateway.batches.lines); NULL: not a result of a batch


class BatchRow(Base):
    """A batch. Times are NULL until the batch reaches that state."""

    __tablename__ = "batches"
    __table_args__ = (Index(None, "tenant", "created_unix_ms"), Index(None, "created_unix_ms"), Index(None, "status"))

    id: Mapped[str] = mapped_column(primary_key=True)  # "batch_…"
    surface: Mapped[str]  # "openai" | "anthropic": the API that created it
    tenant: Mapped[str]  # which can see it
    team_id: Mapped[str]  # TeamRow.id, whose webhooks report it
    key_id: Mapped[str]  # ApiKeyRow.id, which is charged for its lines
    key_name: Mapped[str]
    endpoint: Mapped[str]  # a path, such as "/v1/chat/completions"
    input_file_id: Mapped[str]  # FileRow.id
    output_file_id: Mapped[str | None]  # FileRow.id; NULL: no answers, or not ended yet
    error_file_id: Mapped[str | None]  # FileRow.id, for failed lines
    completion_window: Mapped[str]
    custom_metadata: Mapped[str | None]  # JSON from the client
    result_ttl_s: Mapped[int | None]  # how long its results are kept; NULL: like all files
    status: Mapped[str]  # gateway.batches.store.Status
    errors: Mapped[str | None]  # JSON: why it failed (gateway.batches.lines.LineError)
    created_unix_ms: Mapped[int]
    expires_unix_ms: Mapped[int]  # lines that are not done by then fail
    in_progress_unix_ms: Mapped[int | None]
    finalizing_unix_ms: Mapped[int | None]
    cancelling_unix_ms: Mapped[int | None]
    over_unix_ms: Mapped[int | None]  # completed, failed, expired or cancelled
    total: Mapped[int]  # number of lines; 0 until they are counted
    completed: Mapped[int]  # lines answered
    failed: Mapped[int]  # lines in the error file
    given_up: Mapped[int] = mapped_column(server_default="0")  # failed lines that were canceled or expired
    prompt_tokens: Mapped[int]  # of answered lines
    cached_tokens: Mapped[int]  # part of the prompt tokens
    completion_tokens: Mapped[int]
    models: Mapped[str | None]  # JSON: (lines, estimated tokens) by configured model; NULL until counted
    epoch: Mapped[int]  # incremented when a gateway takes the batch; commits of an earlier holder are rejected
    holder: Mapped[str | None]  # gateway id of the latest holder


# --- the fleet --------------------------------------------------------------------------------------------------------
#
# Tables of the fleet controller.


class MachineRow(Base):
    """A machine of the fleet controller, written before the launch is requested (fleet.machine.Machine)."""

    __tablename__ = "fleet_machines"
    __table_args__ = (Index(None, "state"),)

    machine_id: Mapped[str] = mapped_column(primary_key=True)  # "m-…"
    pool: Mapped[str]
    place: Mapped[str]  # zone and type in its pool; "": the pool has only one
    state: Mapped[str]  # fleet.machine.State
    wanted_unix_ms: Mapped[int]
    provider_id: Mapped[str | None]  # NULL: the provider has not answered
    worker_id: Mapped[str | None]  # NULL: no heartbeat yet
    launched_unix_ms: Mapped[int | None]
    serving_unix_ms: Mapped[int | None]
    drained_unix_ms: Mapped[int | None]
    over_unix_ms: Mapped[int | None]
    reason: Mapped[str]  # of its latest change of state


class DecisionRow(Base):
    """A change of a pool's size by the fleet controller, with its reason in one sentence."""

    __tablename__ = "fleet_decisions"

    decided_unix_ms: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    pool: Mapped[str] = mapped_column(primary_key=True)
    size: Mapped[int]  # target number of machines
    serving: Mapped[int]  # serving workers at that time
    starting: Mapped[int]
    reason: Mapped[str]


class Decision(Struct, frozen=True):
    """A row of ``fleet_decisions``."""

    decided_unix_ms: int
    pool: str
    size: int
    serving: int
    starting: int
    reason: str


# --- webhooks ---------------------------------------------------------------------------------------------------------
#
# Tables of webhooks: endpoints, deliveries, and the budget thresholds that were reported.


class WebhookEndpointRow(Base):
    """A URL that receives a team's events."""

    __tablename__ = "webhook_endpoints"
    __table_args__ = (Index(None, "team_id"),)

    id: Mapped[str] = mapped_column(primary_key=True)  # "wh_…"
    team_id: Mapped[str]  # TeamRow.id
    url: Mapped[str]
    event_types: Mapped[tuple[str, ...]] = mapped_column(WordList)  # of ledger.webhooks.events.EVENT_TYPES
    secret: Mapped[str]  # sealed (ledger.webhooks.secrets)
    previous_secret: Mapped[str | None]  # sealed; for a while after a rotation, deliveries are also signed with it
    previous_until_unix_ms: Mapped[int | None]
    disabled_reason: Mapped[str | None]  # NULL: enabled
    failing_since_unix_ms: Mapped[int | None]  # time of the first failure since the last success; NULL: none
    created_unix_ms: Mapped[int]


class WebhookDeliveryRow(Base):
    """The delivery of one event to one endpoint, with its outcome; deleted some days later."""

    __tablename__ = "webhook_deliveries"
    __table_args__ = (
        Index(None, "due_unix_ms"),
        Index(None, "endpoint_id", "created_unix_ms"),
        Index(None, "created_unix_ms"),
    )

    event_id: Mapped[str] = mapped_column(primary_key=True)  # "evt_…"
    endpoint_id: Mapped[str] = mapped_column(primary_key=True)  # WebhookEndpointRow.id
    event_type: Mapped[str]
    body: Mapped[str]  # the JSON that is sent
    created_unix_ms: Mapped[int]
    # When to send it. During an attempt: when another process may retry it. NULL: ended.
    due_unix_ms: Mapped[int | None]
    outcome: Mapped[str]  # "waiting" | "delivered" | "failed"
    attempts: Mapped[int]
    attempted_unix_ms: Mapped[int | None]  # the last one
    http_status: Mapped[int | None]  # of the last attempt; NULL: no answer
    error: Mapped[str | None]  # of the last attempt, or why there is none


class WebhookTotalRow(Base):
    """Number of attempts by outcome, over all time and processes, for the metrics."""

    __tablename__ = "webhook_totals"

    outcome: Mapped[str] = mapped_column(primary_key=True)  # ledger.webhooks.deliveries.OUTCOMES
    attempts: Mapped[int]


class BudgetNoticeRow(Base):
    """A threshold of a budget that was reached in a period, so that it is reported only once."""

    __tablename__ = "budget_notices"

    event_id: Mapped[str] = mapped_column(primary_key=True)  # derived from account, period and threshold
    account_id: Mapped[str]  # TeamRow.id or ApiKeyRow.id
    period: Mapped[str]  # db.accounts.principal.period_at
    threshold_percent: Mapped[int]
    created_unix_ms: Mapped[int]
    message: Mapped[bytes | None]  # the message to publish (ledger.webhooks.events); NULL: published
