"""stopped_keys: whether the revocation of a key ends its running requests."""

from collections.abc import Sequence

import sqlalchemy as sa
from alembic import op

revision: str = "0010"
down_revision: str | None = "0009"
branch_labels: str | Sequence[str] | None = None
depends_on: str | Sequence[str] | None = None


def upgrade() -> None:
    op.add_column("api_keys", sa.Column("stops_running", sa.Boolean(), nullable=True))


def downgrade() -> None:
    op.drop_column("api_keys", "stops_running")
