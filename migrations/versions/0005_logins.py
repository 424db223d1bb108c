"""admins and sessions: users of the pages, and their logins."""

from collections.abc import Sequence

import sqlalchemy as sa
from alembic import op

revision: str = "0005"
down_revision: str | None = "0004"
branch_labels: str | Sequence[str] | None = None
depends_on: str | Sequence[str] | None = None


def upgrade() -> None:
    op.create_table(
        "admins",
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("password_hash", sa.Text(), nullable=False),
        sa.Column("changed_unix_ms", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("name", name="pk_admins"),
    )
    op.create_table(
        "sessions",
        sa.Column("token_hmac", sa.Text(), nullable=False),
        sa.Column("user_name", sa.Text(), nullable=False),
        sa.Column("started_unix_ms", sa.BigInteger(), nullable=False),
        sa.Column("ends_unix_ms", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("token_hmac", name="pk_sessions"),
    )


def downgrade() -> None:
    for table_name in ("sessions", "admins"):
        op.drop_table(table_name)
