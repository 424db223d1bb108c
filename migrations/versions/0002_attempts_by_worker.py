"""attempts: one row for each worker that tried. A message of the queue that comes twice may be run by two workers."""

from collections.abc import Sequence

from alembic import op

revision: str = "0002"
down_revision: str | None = "0001"
branch_labels: str | Sequence[str] | None = None
depends_on: str | Sequence[str] | None = None


def upgrade() -> None:
    _set_key("request_id", "attempt", "worker_id")


def downgrade() -> None:
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
