"""PostgreSQL: requests and attempts become partitioned by the day on which the request was received.

Existing rows are not moved: the old table becomes the partition of all days up to its last one, so the migration takes
as long as building its new primary key. SQLite has no partitions and keeps its tables.
"""

import time
from collections.abc import Sequence

import sqlalchemy as sa
from alembic import op

revision: str = "0008"
down_revision: str | None = "0007"
branch_labels: str | Sequence[str] | None = None
depends_on: str | Sequence[str] | None = None

DAY_MS = 86_400_000
KEYS = {"requests": ("request_id",), "attempts": ("request_id", "attempt", "worker_id")}
INDEXES = {
    "requests": (("received_unix_ms",), ("model", "received_unix_ms"), ("key_id", "received_unix_ms")),
    "attempts": (("started_unix_ms",),),
}


def upgrade() -> None:
    op.execute("UPDATE attempts SET received_unix_ms = started_unix_ms WHERE received_unix_ms IS NULL")  # of 0001
    set_nullable(False)
    if op.get_context().dialect.name == "postgresql":
        for table in KEYS:
            partition(table)


def partition(table: str) -> None:
    old = f"{table}_before"
    op.execute(f"ALTER TABLE {table} RENAME TO {old}")
    op.execute(f"ALTER TABLE {old} DROP CONSTRAINT pk_{table}")
    for columns in INDEXES[table]:
        op.execute(f"ALTER INDEX {index_name(table, columns)} RENAME TO {index_name(old, columns)}")
    op.execute(f"CREATE TABLE {table} (LIKE {old} INCLUDING DEFAULTS) PARTITION BY RANGE (received_unix_ms)")
    create_keys(table, (*KEYS[table], "received_unix_ms"))
    op.execute(f"CREATE TABLE {table}_default PARTITION OF {table} DEFAULT")
    newest = op.get_bind().execute(sa.text(f"SELECT max(received_unix_ms) FROM {old}")).scalar()  # noqa: S608
    if newest is None:
        op.execute(f"DROP TABLE {old}")
        return
    until = (min(newest, time.time_ns() // 1_000_000) // DAY_MS + 1) * DAY_MS  # a midnight, UTC
    # What some clock has dated later would keep days to come out of partitions of their own.
    op.execute(
        f"WITH late AS (DELETE FROM {old} WHERE received_unix_ms >= {until} RETURNING *)"  # noqa: S608
        f" INSERT INTO {table} SELECT * FROM late"
    )
    op.execute(f"ALTER TABLE {table} ATTACH PARTITION {old} FOR VALUES FROM (MINVALUE) TO ({until})")


def create_keys(table: str, key: Sequence[str]) -> None:
    op.execute(f"ALTER TABLE {table} ADD CONSTRAINT pk_{table} PRIMARY KEY ({', '.join(key)})")
    for columns in INDEXES[table]:
        op.execute(f"CREATE INDEX {index_name(table, columns)} ON {table} ({', '.join(columns)})")


def downgrade() -> None:
    if op.get_context().dialect.name == "postgresql":
        for table, key in KEYS.items():
            op.execute(f"ALTER TABLE {table} RENAME TO {table}_partitioned")
            op.execute(f"CREATE TABLE {table} (LIKE {table}_partitioned INCLUDING DEFAULTS)")
            op.execute(f"INSERT INTO {table} SELECT * FROM {table}_partitioned")  # noqa: S608
            op.execute(f"DROP TABLE {table}_partitioned")
            create_keys(table, key)
    set_nullable(True)


def set_nullable(nullable: bool) -> None:
    with op.batch_alter_table("attempts") as attempts:
        attempts.alter_column("received_unix_ms", existing_type=sa.BigInteger(), nullable=nullable)


def index_name(table: str, columns: Sequence[str]) -> str:
    return f"ix_{table}_{'_'.join(columns)}"
