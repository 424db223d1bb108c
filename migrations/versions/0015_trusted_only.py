"""trusted_only: whether a key's or a team's requests go to trusted pools alone."""

from collections.abc import Sequence

import sqlalchemy as sa
from alembic import op

revision: str = "0015"
down_revision: str | None = "0014"
branch_labels: str | Sequence[str] | None = None
depends_on: str | Sequence[str] | None = None


def upgrade() -> None:
    for table in ("teams", "api_keys"):
        op.add_column(table, sa.Column("trusted_only", sa.Boolean(), nullable=True))


def downgrade() -> None:
    for table in ("teams", "api_keys"):
        op.drop_column(table, "trusted_only")
