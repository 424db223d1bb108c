"""requests and attempts: timings of the engine."""

from collections.abc import Sequence
from typing import Any

import sqlalchemy as sa
from alembic import op

revision: str = "0003"
down_revision: str | None = "0002"
branch_labels: str | Sequence[str] | None = None
depends_on: str | Sequence[str] | None = None

TABLES = ("requests", "attempts")
COLUMNS: dict[str, sa.types.TypeEngine[Any]] = {
    "engine_queue_ms": sa.Double(),
    "prefill_ms": sa.Double(),
    "decode_ms": sa.Double(),
    "preemptions": sa.BigInteger(),
}


def upgrade() -> None:
    for table_name in TABLES:
        with op.batch_alter_table(table_name) as table:
            for name, kind in COLUMNS.items():
                table.add_column(sa.Column(name, kind, nullable=True))


def downgrade() -> None:
    for table_name in TABLES:
        with op.batch_alter_table(table_name) as table:
            for name in COLUMNS:
                table.drop_column(name)
