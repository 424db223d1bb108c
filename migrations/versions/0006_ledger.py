"""The ledger at scale: teams and charges of requests, rollups, histograms, prices, machine time, payloads.

Existing requests get their keys' current team; ``spillway db check-rollups --repair`` builds their rollups.
"""

from collections.abc import Sequence
from typing import Any

import sqlalchemy as sa
from alembic import op

revision: str = "0006"
down_revision: str | None = "0005"
branch_labels: str | Sequence[str] | None = None
depends_on: str | Sequence[str] | None = None

NEW_COLUMNS: dict[str, dict[str, sa.types.TypeEngine[Any]]] = {
    "requests": {
        "team_id": sa.Text(),
        "organisation_id": sa.Text(),
        "tier": sa.Text(),
        "charge_nano_usd": sa.BigInteger(),
    },
    "attempts": {"team_id": sa.Text(), "organisation_id": sa.Text()},
}
DIMENSIONS = ("model", "pool", "provider", "region", "tier", "team_id", "key_id", "endpoint", "outcome")
SUMS = (
    "requests",
    "attempts",
    "failovers",
    "retried",
    "prompt_tokens",
    "cached_tokens",
    "completion_tokens",
    "charge_nano_usd",
    "total_ms",
)
MEASURES = ("queue_ms", "ttft_ms", "tpot_ms", "total_ms", "prompt_tokens", "completion_tokens")


def upgrade() -> None:
    for table_name, columns in NEW_COLUMNS.items():
        with op.batch_alter_table(table_name) as table:
            for name, kind in columns.items():
                table.add_column(sa.Column(name, kind, nullable=True))
    name_the_teams_of_old_requests()
    create_slices()
    create_sliced("rollups", [sa.Column(name, sa.BigInteger(), nullable=False) for name in SUMS])
    create_sliced("histograms", [sa.Column(name, sa.LargeBinary(), nullable=True) for name in MEASURES])
    create_price_book()
    create_instance_seconds()
    create_payloads()


def name_the_teams_of_old_requests() -> None:
    op.execute("UPDATE requests SET team_id = (SELECT team_id FROM api_keys WHERE api_keys.id = requests.key_id)")
    op.execute(
        "UPDATE requests SET organisation_id = (SELECT organisation_id FROM teams WHERE teams.id = requests.team_id)"
    )


def create_slices() -> None:
    op.create_table(
        "slices",
        sa.Column("id", sa.BigInteger(), nullable=False),
        *(sa.Column(dimension, sa.Text(), nullable=False) for dimension in DIMENSIONS),
        sa.PrimaryKeyConstraint("id", name="pk_slices"),
    )


def create_sliced(name: str, values: Sequence[sa.Column[object]]) -> None:
    key = ("width_s", "bucket_unix_ms", "slice_id")
    op.create_table(
        name,
        *(sa.Column(part, sa.BigInteger(), nullable=False) for part in key),
        *values,
        sa.PrimaryKeyConstraint(*key, name=f"pk_{name}"),
        sqlite_with_rowid=False,
    )


def create_price_book() -> None:
    prices = ("prompt_nano_usd", "cached_nano_usd", "completion_nano_usd", "machine_nano_usd", "on_demand_nano_usd")
    op.create_table(
        "price_book",
        sa.Column("model", sa.Text(), nullable=False),
        sa.Column("pool", sa.Text(), nullable=False),
        sa.Column("from_unix_ms", sa.BigInteger(), nullable=False),
        sa.Column("source", sa.Text(), nullable=False),
        *(sa.Column(name, sa.BigInteger(), nullable=True) for name in prices),
        sa.PrimaryKeyConstraint("model", "pool", "from_unix_ms", name="pk_price_book"),
    )


def create_instance_seconds() -> None:
    numbers = ("up_from_unix_ms", "up_until_unix_ms", "busy_from_ms", "busy_until_ms", "nano_usd_per_hour")
    op.create_table(
        "instance_seconds",
        sa.Column("bucket_unix_ms", sa.BigInteger(), nullable=False),
        sa.Column("worker_id", sa.Text(), nullable=False),
        *(sa.Column(name, sa.Text(), nullable=False) for name in ("pool", "provider", "region", "tier")),
        *(sa.Column(name, sa.BigInteger(), nullable=False) for name in numbers),
        sa.Column("on_demand_nano_usd_per_hour", sa.BigInteger(), nullable=True),
        sa.PrimaryKeyConstraint("bucket_unix_ms", "worker_id", name="pk_instance_seconds"),
    )


def create_payloads() -> None:
    op.create_table(
        "payloads",
        sa.Column("request_id", sa.Text(), nullable=False),
        sa.Column("received_unix_ms", sa.BigInteger(), nullable=False),
        sa.Column("model", sa.Text(), nullable=False),
        sa.Column("endpoint", sa.Text(), nullable=False),
        sa.Column("key_id", sa.Text(), nullable=False),
        sa.Column("team_id", sa.Text(), nullable=False),
        sa.Column("end_user", sa.Text(), nullable=True),
        sa.Column("train_ok", sa.Boolean(), nullable=False),
        sa.Column("redacted", sa.Boolean(), nullable=False),
        sa.Column("expires_unix_ms", sa.BigInteger(), nullable=False),
        sa.Column("dropped", sa.Boolean(), nullable=False),
        sa.Column("encoding", sa.Text(), nullable=False),
        sa.Column("request", sa.LargeBinary(), nullable=True),
        sa.Column("answer", sa.LargeBinary(), nullable=True),
        sa.PrimaryKeyConstraint("request_id", name="pk_payloads"),
    )
    op.create_index("ix_payloads_expires_unix_ms", "payloads", ["expires_unix_ms"])
    op.create_index("ix_payloads_key_id_received_unix_ms", "payloads", ["key_id", "received_unix_ms"])
    op.create_index("ix_payloads_end_user", "payloads", ["end_user"])


def downgrade() -> None:
    for table_name in ("payloads", "instance_seconds", "price_book", "histograms", "rollups", "slices"):
        op.drop_table(table_name)
    for table_name, columns in NEW_COLUMNS.items():
        with op.batch_alter_table(table_name) as table:
            for name in columns:
                table.drop_column(name)
