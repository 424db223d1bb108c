"""organisations, teams and the audit log; permissions of keys. Existing keys join the first team."""

import time
from collections.abc import Sequence

import sqlalchemy as sa
from alembic import op

revision: str = "0004"
down_revision: str | None = "0003"
branch_labels: str | Sequence[str] | None = None
depends_on: str | Sequence[str] | None = None

ORGANISATION_ID = "org_default"
TEAM_ID = "team_default"


def upgrade() -> None:
    organisations, teams = create_organisations(), create_teams()
    create_audit_log()
    now_unix_ms = time.time_ns() // 1_000_000
    op.bulk_insert(organisations, [{"id": ORGANISATION_ID, "name": "default", "created_unix_ms": now_unix_ms}])
    team = {"id": TEAM_ID, "organisation_id": ORGANISATION_ID, "name": "default", "created_unix_ms": now_unix_ms}
    op.bulk_insert(teams, [team])
    add_to_keys()


def policy() -> list[sa.Column[object]]:
    """Return the columns of db.tables._Policy."""
    return [
        sa.Column("requests_per_minute", sa.BigInteger(), nullable=True),
        sa.Column("tokens_per_minute", sa.BigInteger(), nullable=True),
        sa.Column("max_concurrent", sa.BigInteger(), nullable=True),
        sa.Column("budget_nano_usd", sa.BigInteger(), nullable=True),
        sa.Column("budget_period", sa.Text(), nullable=True),
        sa.Column("weight", sa.Double(), nullable=True),
        sa.Column("priority", sa.Text(), nullable=True),
        sa.Column("log_payload", sa.Boolean(), nullable=True),
        sa.Column("train_ok", sa.Boolean(), nullable=True),
        sa.Column("redact", sa.Boolean(), nullable=True),
        sa.Column("retention_days", sa.BigInteger(), nullable=True),
    ]


def create_organisations() -> sa.Table:
    return op.create_table(
        "organisations",
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("created_unix_ms", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_organisations"),
        sa.UniqueConstraint("name", name="uq_organisations_name"),
    )


def create_teams() -> sa.Table:
    return op.create_table(
        "teams",
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("organisation_id", sa.Text(), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("created_unix_ms", sa.BigInteger(), nullable=False),
        *policy(),
        sa.PrimaryKeyConstraint("id", name="pk_teams"),
        sa.UniqueConstraint("name", name="uq_teams_name"),
    )


def create_audit_log() -> None:
    op.create_table(
        "audit_log",
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("at_unix_ms", sa.BigInteger(), nullable=False),
        sa.Column("actor", sa.Text(), nullable=False),
        sa.Column("action", sa.Text(), nullable=False),
        sa.Column("subject_id", sa.Text(), nullable=False),
        sa.Column("before", sa.Text(), nullable=True),
        sa.Column("after", sa.Text(), nullable=True),
        sa.PrimaryKeyConstraint("id", name="pk_audit_log"),
    )
    op.create_index("ix_audit_log_at_unix_ms", "audit_log", ["at_unix_ms"])


def add_to_keys() -> None:
    with op.batch_alter_table("api_keys") as table:
        table.add_column(sa.Column("team_id", sa.Text(), nullable=False, server_default=TEAM_ID))
        table.add_column(sa.Column("scopes", sa.Text(), nullable=False, server_default="inference"))
        table.add_column(sa.Column("models", sa.Text(), nullable=True))
        table.add_column(sa.Column("expires_unix_ms", sa.BigInteger(), nullable=True))
        table.add_column(sa.Column("previous_hmac", sa.Text(), nullable=True))
        table.add_column(sa.Column("previous_until_unix_ms", sa.BigInteger(), nullable=True))
        for column in policy():
            table.add_column(column)
        table.create_unique_constraint("uq_api_keys_previous_hmac", ["previous_hmac"])
    # The defaults were for existing keys; new ones must be created with a value.
    with op.batch_alter_table("api_keys") as table:
        table.alter_column("team_id", server_default=None)
        table.alter_column("scopes", server_default=None)


def downgrade() -> None:
    with op.batch_alter_table("api_keys") as table:
        table.drop_constraint("uq_api_keys_previous_hmac", type_="unique")
        for name in ("team_id", "scopes", "models", "expires_unix_ms", "previous_hmac", "previous_until_unix_ms"):
            table.drop_column(name)
        for column in policy():
            table.drop_column(column.name)
    for table_name in ("audit_log", "teams", "organisations"):
        op.drop_table(table_name)
