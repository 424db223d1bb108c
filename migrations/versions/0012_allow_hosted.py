"""allow_hosted: the hosted APIs that a key's or a team's prompts may be sent to."""

from collections.abc import Sequence

import sqlalchemy as sa
from alembic import op

revision: str = "0012"
down_revision: str | None = "0011"
branch_labels: str | Sequence[str] | None = None
depends_on: str | Sequence[str] | None = None


def upgrade() -> None:
    for table in ("teams", "api_keys"):
        op.add_column(table, sa.Column("allow_hosted", sa.Text(), nullable=True))


def downgrade() -> None:
    for table in ("teams", "api_keys"):
        op.drop_column(table, "allow_hosted")
