"""set_aside: items that are no longer retried, each with its reason."""

from collections.abc import Sequence

import sqlalchemy as sa
from alembic import op

revision: str = "0018"
down_revision: str | None = "0017"
branch_labels: str | Sequence[str] | None = None
depends_on: str | Sequence[str] | None = None


def upgrade() -> None:
    op.create_table(
        "set_aside",
        sa.Column("kind", sa.Text(), nullable=False),
        sa.Column("item", sa.Text(), nullable=False),
        sa.Column("owner", sa.Text(), nullable=False),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.Column("at_unix_ms", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("kind", "item", name=op.f("pk_set_aside")),
    )
    op.create_index(op.f("ix_set_aside_kind_at_unix_ms"), "set_aside", ["kind", "at_unix_ms"])
    op.create_index(op.f("ix_set_aside_at_unix_ms"), "set_aside", ["at_unix_ms"])


def downgrade() -> None:
    op.drop_table("set_aside")
