"""The tables of revision 0017, the oldest supported one. db/tables.py explains the columns.

An older database needs the revisions that have led here: ``migrations.upgrade`` refuses it.
"""

import time
from collections.abc import Iterator, Sequence
from typing import Any

import sqlalchemy as sa
from alembic import op

revision: str = "0017"
down_revision: str | None = None
branch_labels: str | Sequence[str] | None = None
depends_on: str | Sequence[str] | None = None

TEXT = sa.Text()
INTEGER = sa.BigInteger()
FLOAT: sa.Double[float] = sa.Double()
FLAG = sa.Boolean()
BYTES = sa.LargeBinary()


def upgrade() -> None:
    create_teams_and_keys()
    create_logins()
    create_requests()
    create_attempts()
    create_rollups()
    create_money()
    create_payloads()
    create_fleet()
    create_webhooks()
    create_files()
    create_batches()


def columns(kind: sa.types.TypeEngine[Any], *names: str, nullable: bool = False) -> Iterator[sa.Column[Any]]:
    return (sa.Column(name, kind, nullable=nullable) for name in names)


def policy() -> Iterator[sa.Column[Any]]:
    """Yield the columns of db.tables._Policy at this revision."""
    yield from columns(
        INTEGER, "requests_per_minute", "tokens_per_minute", "max_concurrent", "budget_nano_usd", nullable=True
    )
    yield from columns(TEXT, "budget_period", nullable=True)
    yield from columns(FLOAT, "weight", nullable=True)
    yield from columns(TEXT, "priority", nullable=True)
    yield from columns(FLAG, "log_payload", "train_ok", "redact", nullable=True)
    yield from columns(INTEGER, "retention_days", nullable=True)


def create_teams_and_keys() -> None:
    organisations = op.create_table(
        "organisations",
        *columns(TEXT, "id", "name"),
        *columns(INTEGER, "created_unix_ms"),
        sa.PrimaryKeyConstraint("id", name="pk_organisations"),
        sa.UniqueConstraint("name", name="uq_organisations_name"),
    )
    teams = op.create_table(
        "teams",
        *columns(TEXT, "id", "organisation_id", "name"),
        *columns(INTEGER, "created_unix_ms"),
        *policy(),
        *columns(TEXT, "allow_hosted", nullable=True),
        *columns(FLAG, "trusted_only", nullable=True),
        sa.PrimaryKeyConstraint("id", name="pk_teams"),
        sa.UniqueConstraint("name", name="uq_teams_name"),
    )
    first = {"name": "default", "created_unix_ms": time.time_ns() // 1_000_000}
    op.bulk_insert(organisations, [{"id": "org_default", **first}])
    op.bulk_insert(teams, [{"id": "team_default", "organisation_id": "org_default", **first}])
    op.create_table(
        "api_keys",
        *columns(TEXT, "id", "name", "token_hmac", "last_four"),
        *columns(INTEGER, "created_unix_ms"),
        *columns(INTEGER, "revoked_unix_ms", nullable=True),
        *columns(TEXT, "team_id", "scopes"),
        *columns(TEXT, "models", nullable=True),
        *columns(INTEGER, "expires_unix_ms", nullable=True),
        *columns(TEXT, "previous_hmac", nullable=True),
        *columns(INTEGER, "previous_until_unix_ms", nullable=True),
        *policy(),
        *columns(FLAG, "stops_running", nullable=True),
        *columns(TEXT, "allow_hosted", nullable=True),
        *columns(FLAG, "trusted_only", nullable=True),
        sa.PrimaryKeyConstraint("id", name="pk_api_keys"),
        sa.UniqueConstraint("token_hmac", name="uq_api_keys_token_hmac"),
        sa.UniqueConstraint("previous_hmac", name="uq_api_keys_previous_hmac"),
    )
    active = sa.text("revoked_unix_ms IS NULL")
    op.create_index(
        "uq_api_keys_active_name", "api_keys", ["name"], unique=True, sqlite_where=active, postgresql_where=active
    )


def create_logins() -> None:
    op.create_table(
        "audit_log",
        *columns(TEXT, "id"),
        *columns(INTEGER, "at_unix_ms"),
        *columns(TEXT, "actor", "action", "subject_id"),
        *columns(TEXT, "before", "after", nullable=True),
        sa.PrimaryKeyConstraint("id", name="pk_audit_log"),
    )
    create_index("audit_log", "at_unix_ms")
    op.create_table(
        "admins",
        *columns(TEXT, "name", "password_hash"),
        *columns(INTEGER, "changed_unix_ms"),
        sa.PrimaryKeyConstraint("name", name="pk_admins"),
    )
    op.create_table(
        "sessions",
        *columns(TEXT, "token_hmac", "user_name"),
        *columns(INTEGER, "started_unix_ms", "ends_unix_ms"),
        sa.PrimaryKeyConstraint("token_hmac", name="pk_sessions"),
    )


def create_requests() -> None:
    create_by_day(
        "requests",
        *columns(TEXT, "request_id", "gateway_id"),
        *columns(INTEGER, "received_unix_ms"),
        *columns(TEXT, "endpoint", "model", "key_id", "key_name"),
        *columns(FLAG, "stream"),
        *columns(TEXT, "outcome"),
        *columns(INTEGER, "http_status"),
        *columns(TEXT, "error_code", "finish_reason", nullable=True),
        *columns(INTEGER, "prompt_tokens", "cached_tokens", "completion_tokens", "attempts"),
        *columns(FLOAT, "queue_ms", "ttft_ms", nullable=True),
        *columns(FLOAT, "total_ms"),
        *columns(TEXT, "pool", "provider", "region", nullable=True),
        *columns(FLOAT, "engine_queue_ms", "prefill_ms", "decode_ms", nullable=True),
        *columns(INTEGER, "preemptions", nullable=True),
        *columns(TEXT, "team_id", "organisation_id", "tier", nullable=True),
        *columns(INTEGER, "charge_nano_usd", nullable=True),
        *columns(TEXT, "counted_by", nullable=True),
        key=("request_id",),
        indexes=(("received_unix_ms",), ("model", "received_unix_ms"), ("key_id", "received_unix_ms")),
    )
    op.create_table(
        "open_requests",
        *columns(TEXT, "request_id", "gateway_id"),
        *columns(INTEGER, "received_unix_ms"),
        *columns(TEXT, "endpoint", "model", "key_id", "key_name"),
        *columns(FLAG, "stream"),
        *columns(INTEGER, "prompt_tokens", "completion_tokens"),
        *columns(TEXT, "team_id", "organisation_id", nullable=True),
        sa.PrimaryKeyConstraint("request_id", name="pk_open_requests"),
    )


def create_attempts() -> None:
    create_by_day(
        "attempts",
        *columns(TEXT, "request_id"),
        *columns(INTEGER, "attempt"),
        *columns(TEXT, "worker_id", "pool", "provider", "region", "tier", "engine", "model"),
        *columns(INTEGER, "started_unix_ms"),
        *columns(TEXT, "outcome"),
        *columns(TEXT, "error_code", nullable=True),
        *columns(INTEGER, "prompt_tokens", "cached_tokens", "completion_tokens"),
        *columns(FLOAT, "queue_ms"),
        *columns(FLOAT, "ttft_ms", nullable=True),
        *columns(FLOAT, "total_ms", "usd_per_hour"),
        *columns(INTEGER, "resumed_tokens", nullable=True),
        *columns(INTEGER, "received_unix_ms"),
        *columns(TEXT, "gateway_id", "endpoint", "key_id", "key_name", nullable=True),
        *columns(FLAG, "stream", nullable=True),
        *columns(FLOAT, "engine_queue_ms", "prefill_ms", "decode_ms", nullable=True),
        *columns(INTEGER, "preemptions", nullable=True),
        *columns(TEXT, "team_id", "organisation_id", "counted_by", "rescue", nullable=True),
        key=("request_id", "attempt", "worker_id"),
        indexes=(("started_unix_ms",),),
    )


def create_by_day(
    table: str, *fields: sa.Column[Any], key: tuple[str, ...], indexes: tuple[tuple[str, ...], ...]
) -> None:
    """Create a table that PostgreSQL partitions by the day on which the request was received: ledger/partitions.py."""
    is_partitioned = op.get_context().dialect.name == "postgresql"
    key = (*key, "received_unix_ms") if is_partitioned else key
    op.create_table(
        table,
        *fields,
        sa.PrimaryKeyConstraint(*key, name=f"pk_{table}"),
        postgresql_partition_by="RANGE (received_unix_ms)",
    )
    for index in indexes:
        create_index(table, *index)
    if is_partitioned:
        op.execute(f"CREATE TABLE {table}_default PARTITION OF {table} DEFAULT")


def create_rollups() -> None:
    op.create_table(
        "slices",
        *columns(INTEGER, "id"),
        *columns(TEXT, "model", "pool", "provider", "region", "tier", "team_id", "key_id", "endpoint", "outcome"),
        sa.PrimaryKeyConstraint("id", name="pk_slices"),
    )
    key = ("width_s", "bucket_unix_ms", "slice_id")
    op.create_table(
        "rollups",
        *columns(INTEGER, *key, "requests", "attempts", "failovers", "retried"),
        *columns(INTEGER, "prompt_tokens", "cached_tokens", "completion_tokens", "charge_nano_usd", "total_ms"),
        sa.PrimaryKeyConstraint(*key, name="pk_rollups"),
        sqlite_with_rowid=False,
    )
    op.create_table(
        "histograms",
        *columns(INTEGER, *key),
        *columns(BYTES, "queue_ms", "ttft_ms", "tpot_ms", "total_ms", nullable=True),
        *columns(BYTES, "prompt_tokens", "completion_tokens", nullable=True),
        sa.PrimaryKeyConstraint(*key, name="pk_histograms"),
        sqlite_with_rowid=False,
    )


def create_money() -> None:
    op.create_table(
        "price_book",
        *columns(TEXT, "model", "pool"),
        *columns(INTEGER, "from_unix_ms"),
        *columns(TEXT, "source"),
        *columns(INTEGER, "prompt_nano_usd", "cached_nano_usd", "completion_nano_usd", nullable=True),
        *columns(INTEGER, "machine_nano_usd", "on_demand_nano_usd", nullable=True),
        sa.PrimaryKeyConstraint("model", "pool", "from_unix_ms", name="pk_price_book"),
    )
    op.create_table(
        "instance_seconds",
        *columns(INTEGER, "bucket_unix_ms"),
        *columns(TEXT, "worker_id", "pool", "provider", "region", "tier"),
        *columns(INTEGER, "up_from_unix_ms", "up_until_unix_ms", "busy_from_ms", "busy_until_ms", "nano_usd_per_hour"),
        *columns(INTEGER, "on_demand_nano_usd_per_hour", nullable=True),
        sa.PrimaryKeyConstraint("bucket_unix_ms", "worker_id", name="pk_instance_seconds"),
    )


def create_payloads() -> None:
    op.create_table(
        "payloads",
        *columns(TEXT, "request_id"),
        *columns(INTEGER, "received_unix_ms"),
        *columns(TEXT, "model", "endpoint", "key_id", "team_id"),
        *columns(TEXT, "end_user", nullable=True),
        *columns(FLAG, "train_ok", "redacted"),
        *columns(INTEGER, "expires_unix_ms"),
        *columns(FLAG, "dropped"),
        *columns(TEXT, "encoding"),
        *columns(BYTES, "request", "answer", nullable=True),
        sa.PrimaryKeyConstraint("request_id", name="pk_payloads"),
    )
    create_index("payloads", "expires_unix_ms")
    create_index("payloads", "key_id", "received_unix_ms")
    create_index("payloads", "end_user")


def create_fleet() -> None:
    op.create_table(
        "fleet_machines",
        *columns(TEXT, "machine_id", "pool", "place", "state"),
        *columns(INTEGER, "wanted_unix_ms"),
        *columns(TEXT, "provider_id", "worker_id", nullable=True),
        *columns(INTEGER, "launched_unix_ms", "serving_unix_ms", "drained_unix_ms", "over_unix_ms", nullable=True),
        *columns(TEXT, "reason"),
        sa.PrimaryKeyConstraint("machine_id", name="pk_fleet_machines"),
    )
    create_index("fleet_machines", "state")
    op.create_table(
        "fleet_decisions",
        *columns(INTEGER, "decided_unix_ms"),
        *columns(TEXT, "pool"),
        *columns(INTEGER, "size", "serving", "starting"),
        *columns(TEXT, "reason"),
        sa.PrimaryKeyConstraint("decided_unix_ms", "pool", name="pk_fleet_decisions"),
    )


def create_webhooks() -> None:
    op.create_table(
        "webhook_endpoints",
        *columns(TEXT, "id", "team_id", "url", "event_types", "secret"),
        *columns(TEXT, "previous_secret", nullable=True),
        *columns(INTEGER, "previous_until_unix_ms", nullable=True),
        *columns(TEXT, "disabled_reason", nullable=True),
        *columns(INTEGER, "failing_since_unix_ms", nullable=True),
        *columns(INTEGER, "created_unix_ms"),
        sa.PrimaryKeyConstraint("id", name="pk_webhook_endpoints"),
    )
    create_index("webhook_endpoints", "team_id")
    op.create_table(
        "webhook_deliveries",
        *columns(TEXT, "event_id", "endpoint_id", "event_type", "body"),
        *columns(INTEGER, "created_unix_ms"),
        *columns(INTEGER, "due_unix_ms", nullable=True),
        *columns(TEXT, "outcome"),
        *columns(INTEGER, "attempts"),
        *columns(INTEGER, "attempted_unix_ms", "http_status", nullable=True),
        *columns(TEXT, "error", nullable=True),
        sa.PrimaryKeyConstraint("event_id", "endpoint_id", name="pk_webhook_deliveries"),
    )
    create_index("webhook_deliveries", "due_unix_ms")
    create_index("webhook_deliveries", "endpoint_id", "created_unix_ms")
    create_index("webhook_deliveries", "created_unix_ms")
    op.create_table(
        "webhook_totals",
        *columns(TEXT, "outcome"),
        *columns(INTEGER, "attempts"),
        sa.PrimaryKeyConstraint("outcome", name="pk_webhook_totals"),
    )
    op.create_table(
        "budget_notices",
        *columns(TEXT, "event_id", "account_id", "period"),
        *columns(INTEGER, "threshold_percent", "created_unix_ms"),
        *columns(BYTES, "message", nullable=True),
        sa.PrimaryKeyConstraint("event_id", name="pk_budget_notices"),
    )


def create_files() -> None:
    op.create_table(
        "files",
        *columns(TEXT, "id", "tenant", "key_id"),
        *columns(INTEGER, "created_unix_ms", "expires_unix_ms"),
        *columns(TEXT, "purpose", "filename"),
        *columns(INTEGER, "size_bytes"),
        sa.PrimaryKeyConstraint("id", name="pk_files"),
    )
    create_index("files", "tenant", "created_unix_ms")
    create_index("files", "expires_unix_ms")
    op.create_table(
        "file_parts",
        *columns(TEXT, "file_id"),
        *columns(INTEGER, "number"),
        *columns(TEXT, "object_name"),
        *columns(INTEGER, "size_bytes"),
        *columns(BYTES, "lines", nullable=True),
        sa.PrimaryKeyConstraint("file_id", "number", name="pk_file_parts"),
    )


def create_batches() -> None:
    op.create_table(
        "batches",
        *columns(TEXT, "id", "surface", "tenant", "team_id", "key_id", "key_name", "endpoint", "input_file_id"),
        *columns(TEXT, "output_file_id", "error_file_id", nullable=True),
        *columns(TEXT, "completion_window"),
        *columns(TEXT, "custom_metadata", nullable=True),
        *columns(INTEGER, "result_ttl_s", nullable=True),
        *columns(TEXT, "status"),
        *columns(TEXT, "errors", nullable=True),
        *columns(INTEGER, "created_unix_ms", "expires_unix_ms"),
        *columns(INTEGER, "in_progress_unix_ms", "finalizing_unix_ms", "cancelling_unix_ms", nullable=True),
        *columns(INTEGER, "over_unix_ms", nullable=True),
        *columns(INTEGER, "total", "completed", "failed", "prompt_tokens", "cached_tokens", "completion_tokens"),
        *columns(TEXT, "models", nullable=True),
        *columns(INTEGER, "epoch"),
        *columns(TEXT, "holder", nullable=True),
        sa.Column("given_up", INTEGER, nullable=False, server_default="0"),
        sa.PrimaryKeyConstraint("id", name="pk_batches"),
    )
    create_index("batches", "tenant", "created_unix_ms")
    create_index("batches", "status")
    create_index("batches", "created_unix_ms")


def create_index(table: str, *names: str) -> None:
    op.create_index(f"ix_{table}_{'_'.join(names)}", table, names)
