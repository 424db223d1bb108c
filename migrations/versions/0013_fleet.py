"""fleet: the machines that the controller wanted, and its decisions."""

from collections.abc import Sequence

import sqlalchemy as sa
from alembic import op

revision: str = "0013"
down_revision: str | None = "0012"
branch_labels: str | Sequence[str] | None = None
depends_on: str | Sequence[str] | None = None


def upgrade() -> None:
    op.create_table(
        "fleet_machines",
        sa.Column("machine_id", sa.Text(), nullable=False),
        sa.Column("pool", sa.Text(), nullable=False),
        sa.Column("place", sa.Text(), nullable=False),
        sa.Column("state", sa.Text(), nullable=False),
        sa.Column("wanted_unix_ms", sa.BigInteger(), nullable=False),
        sa.Column("provider_id", sa.Text(), nullable=True),
        sa.Column("worker_id", sa.Text(), nullable=True),
        sa.Column("launched_unix_ms", sa.BigInteger(), nullable=True),
        sa.Column("serving_unix_ms", sa.BigInteger(), nullable=True),
        sa.Column("drained_unix_ms", sa.BigInteger(), nullable=True),
        sa.Column("over_unix_ms", sa.BigInteger(), nullable=True),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("machine_id", name=op.f("pk_fleet_machines")),
    )
    op.create_index(op.f("ix_fleet_machines_state"), "fleet_machines", ["state"])
    op.create_table(
        "fleet_decisions",
        sa.Column("decided_unix_ms", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("pool", sa.Text(), nullable=False),
        sa.Column("size", sa.BigInteger(), nullable=False),
        sa.Column("serving", sa.BigInteger(), nullable=False),
        sa.Column("starting", sa.BigInteger(), nullable=False),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("decided_unix_ms", "pool", name=op.f("pk_fleet_decisions")),
    )


def downgrade() -> None:
    op.drop_table("fleet_decisions")
    op.drop_index(op.f("ix_fleet_machines_state"), "fleet_machines")
    op.drop_table("fleet_machines")
