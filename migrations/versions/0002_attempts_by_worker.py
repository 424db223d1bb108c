"""attempts: one row for each worker that tried, with the columns for a request's row if its gateway dies.

A message that the queue delivers twice may be run by two workers.
"""

from collections.abc import Sequence
from typing import Any

import sqlalchemy as sa
from alembic import op

revision: str = "0002"
down_revision: str | None = "0001"
branch_labels: str | Sequence[str] | None = None
depends_on: str | Sequence[str] | None = None

COLUMNS: dict[str, sa.types.TypeEngine[Any]] = {
    "resumed_tokens": sa.BigInteger(),
    "received_unix_ms": sa.BigInteger(),
    "gateway_id": sa.Text(),
    "endpoint": sa.Text(),
    "key_id": sa.Text(),
    "key_name": sa.Text(),
    "stream": sa.Boolean(),
}


def upgrade() -> None:
    _set_key("request_id", "attempt", "worker_id")
    with op.batch_alter_table("attempts") as table:
        for name, kind in COLUMNS.items():
            table.add_column(sa.Column(name, kind, nullable=True))


def downgrade() -> None:
    with op.batch_alter_table("attempts") as table:
        for name in COLUMNS:
            table.drop_column(name)
    # Of two workers with the same attempt, one stays: the older key has no room for both.
    op.execute(
        "DELETE FROM attempts WHERE EXISTS (SELECT 1 FROM attempts AS other"
        " WHERE other.request_id = attempts.request_id AND other.attempt = attempts.attempt"
        " AND other.worker_id < attempts.worker_id)"
    )
    _set_key("request_id", "attempt")


def _set_key(*columns: str) -> None:
    with op.batch_alter_table("attempts") as table:
        table.drop_constraint("pk_attempts", type_="primary")
        table.create_primary_key("pk_attempts", list(columns))
