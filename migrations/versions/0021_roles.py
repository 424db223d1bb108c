"""roles: role, teams and browser of each session, and the creator of each key."""

from collections.abc import Sequence

import sqlalchemy as sa
from alembic import op

revision: str = "0021"
down_revision: str | None = "0020"
branch_labels: str | Sequence[str] | None = None
depends_on: str | Sequence[str] | None = None

OF_SESSIONS = ("role", "teams", "address", "browser")


def upgrade() -> None:
    for name in OF_SESSIONS:
        op.add_column("sessions", sa.Column(name, sa.Text()))
    op.add_column("api_keys", sa.Column("created_by", sa.Text()))


def downgrade() -> None:
    op.drop_column("api_keys", "created_by")
    for name in OF_SESSIONS:
        op.drop_column("sessions", name)
