"""webhooks: endpoints, deliveries, totals, and the thresholds of budgets that were told."""

from collections.abc import Sequence

import sqlalchemy as sa
from alembic import op

revision: str = "0014"
down_revision: str | None = "0013"
branch_labels: str | Sequence[str] | None = None
depends_on: str | Sequence[str] | None = None


def upgrade() -> None:
    op.create_table(
        "webhook_endpoints",
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("team_id", sa.Text(), nullable=False),
        sa.Column("url", sa.Text(), nullable=False),
        sa.Column("event_types", sa.Text(), nullable=False),
        sa.Column("secret", sa.Text(), nullable=False),
        sa.Column("previous_secret", sa.Text(), nullable=True),
        sa.Column("previous_until_unix_ms", sa.BigInteger(), nullable=True),
        sa.Column("disabled_reason", sa.Text(), nullable=True),
        sa.Column("failing_since_unix_ms", sa.BigInteger(), nullable=True),
        sa.Column("created_unix_ms", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_webhook_endpoints")),
    )
    op.create_index(op.f("ix_webhook_endpoints_team_id"), "webhook_endpoints", ["team_id"])
    op.create_table(
        "webhook_deliveries",
        sa.Column("event_id", sa.Text(), nullable=False),
        sa.Column("endpoint_id", sa.Text(), nullable=False),
        sa.Column("event_type", sa.Text(), nullable=False),
        sa.Column("body", sa.Text(), nullable=False),
        sa.Column("created_unix_ms", sa.BigInteger(), nullable=False),
        sa.Column("due_unix_ms", sa.BigInteger(), nullable=True),
        sa.Column("outcome", sa.Text(), nullable=False),
        sa.Column("attempts", sa.BigInteger(), nullable=False),
        sa.Column("attempted_unix_ms", sa.BigInteger(), nullable=True),
        sa.Column("http_status", sa.BigInteger(), nullable=True),
        sa.Column("error", sa.Text(), nullable=True),
        sa.PrimaryKeyConstraint("event_id", "endpoint_id", name=op.f("pk_webhook_deliveries")),
    )
    op.create_index(op.f("ix_webhook_deliveries_due_unix_ms"), "webhook_deliveries", ["due_unix_ms"])
    op.create_index(
        op.f("ix_webhook_deliveries_endpoint_id_created_unix_ms"),
        "webhook_deliveries",
        ["endpoint_id", "created_unix_ms"],
    )
    op.create_index(op.f("ix_webhook_deliveries_created_unix_ms"), "webhook_deliveries", ["created_unix_ms"])
    op.create_table(
        "webhook_totals",
        sa.Column("outcome", sa.Text(), nullable=False),
        sa.Column("attempts", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("outcome", name=op.f("pk_webhook_totals")),
    )
    op.create_table(
        "budget_notices",
        sa.Column("event_id", sa.Text(), nullable=False),
        sa.Column("account_id", sa.Text(), nullable=False),
        sa.Column("period", sa.Text(), nullable=False),
        sa.Column("threshold_percent", sa.BigInteger(), nullable=False),
        sa.Column("created_unix_ms", sa.BigInteger(), nullable=False),
        sa.Column("message", sa.LargeBinary(), nullable=True),
        sa.PrimaryKeyConstraint("event_id", name=op.f("pk_budget_notices")),
    )


def downgrade() -> None:
    op.drop_table("budget_notices")
    op.drop_table("webhook_totals")
    op.drop_index(op.f("ix_webhook_deliveries_created_unix_ms"), "webhook_deliveries")
    op.drop_index(op.f("ix_webhook_deliveries_endpoint_id_created_unix_ms"), "webhook_deliveries")
    op.drop_index(op.f("ix_webhook_deliveries_due_unix_ms"), "webhook_deliveries")
    op.drop_table("webhook_deliveries")
    op.drop_index(op.f("ix_webhook_endpoints_team_id"), "webhook_endpoints")
    op.drop_table("webhook_endpoints")
