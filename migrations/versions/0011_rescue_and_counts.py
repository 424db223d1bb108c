"""requests and attempts: the source of their token counts, and how an attempt continued earlier ones."""

from collections.abc import Sequence

import sqlalchemy as sa
from alembic import op

revision: str = "0011"
down_revision: str | None = "0010"
branch_labels: str | Sequence[str] | None = None
depends_on: str | Sequence[str] | None = None


def upgrade() -> None:
    op.add_column("requests", sa.Column("counted_by", sa.Text(), nullable=True))
    op.add_column("attempts", sa.Column("counted_by", sa.Text(), nullable=True))
    op.add_column("attempts", sa.Column("rescue", sa.Text(), nullable=True))


def downgrade() -> None:
    op.drop_column("attempts", "rescue")
    op.drop_column("attempts", "counted_by")
    op.drop_column("requests", "counted_by")
