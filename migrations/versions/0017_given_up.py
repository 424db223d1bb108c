"""given_up: which of a batch's failed lines were never answered; batches are listed by age."""

from collections.abc import Sequence

import sqlalchemy as sa
from alembic import op

revision: str = "0017"
down_revision: str | None = "0016"
branch_labels: str | Sequence[str] | None = None
depends_on: str | Sequence[str] | None = None


def upgrade() -> None:
    # A gateway of the release before does not know it, and still adds batches.
    op.add_column("batches", sa.Column("given_up", sa.BigInteger(), nullable=False, server_default="0"))
    op.create_index(op.f("ix_batches_created_unix_ms"), "batches", ["created_unix_ms"])


def downgrade() -> None:
    op.drop_index(op.f("ix_batches_created_unix_ms"), "batches")
    op.drop_column("batches", "given_up")
