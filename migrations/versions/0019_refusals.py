"""refusals: counts of refused requests by group, and the latest refused requests."""

from collections.abc import Sequence

import sqlalchemy as sa
from alembic import op

revision: str = "0019"
down_revision: str | None = "0018"
branch_labels: str | Sequence[str] | None = None
depends_on: str | Sequence[str] | None = None


def upgrade() -> None:
    op.create_table(
        "refusals",
        sa.Column("request_id", sa.Text(), nullable=False),
        sa.Column("gateway_id", sa.Text(), nullable=False),
        sa.Column("received_unix_ms", sa.BigInteger(), nullable=False),
        sa.Column("endpoint", sa.Text(), nullable=False),
        sa.Column("code", sa.Text(), nullable=False),
        sa.Column("status", sa.BigInteger(), nullable=False),
        sa.Column("method", sa.Text(), nullable=False),
        sa.Column("path", sa.Text(), nullable=False),
        sa.Column("client", sa.Text(), nullable=False),
        sa.Column("message", sa.Text()),
        sa.Column("param", sa.Text()),
        sa.Column("model", sa.Text()),
        sa.Column("key_id", sa.Text(), nullable=False),
        sa.Column("key_name", sa.Text(), nullable=False),
        sa.Column("team_id", sa.Text(), nullable=False),
        sa.Column("organisation_id", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("request_id", name=op.f("pk_refusals")),
    )
    op.create_index(op.f("ix_refusals_key_id_received_unix_ms"), "refusals", ["key_id", "received_unix_ms"])
    op.create_index(op.f("ix_refusals_received_unix_ms"), "refusals", ["received_unix_ms"])
    op.create_table(
        "refusal_groups",
        sa.Column("id", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("code", sa.Text(), nullable=False),
        sa.Column("status", sa.BigInteger(), nullable=False),
        sa.Column("endpoint", sa.Text(), nullable=False),
        sa.Column("key_id", sa.Text(), nullable=False),
        sa.Column("team_id", sa.Text(), nullable=False),
        sa.Column("model", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_refusal_groups")),
    )
    op.create_table(
        "refusal_counts",
        sa.Column("bucket_unix_ms", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("run_id", sa.Text(), nullable=False),
        sa.Column("group_id", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("refusals", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("bucket_unix_ms", "run_id", "group_id", name=op.f("pk_refusal_counts")),
        sqlite_with_rowid=False,
    )


def downgrade() -> None:
    for table in ("refusal_counts", "refusal_groups", "refusals"):
        op.drop_table(table)
