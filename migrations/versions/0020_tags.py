"""tags: tags of requests, spending by tag, and tokens without a price."""

from collections.abc import Sequence

import sqlalchemy as sa
from alembic import op

revision: str = "0020"
down_revision: str | None = "0019"
branch_labels: str | Sequence[str] | None = None
depends_on: str | Sequence[str] | None = None

WIDTHS_S = (900, 3600, 86_400)  # ledger.rollups.WIDTHS_S at this revision
# Tokens of accepted requests without a price, by rollup.
UNPRICED = """
    SELECT s.id AS slice_id, r.received_unix_ms / :width_ms * :width_ms AS start_unix_ms,
           sum(r.prompt_tokens + r.completion_tokens) AS tokens
    FROM requests r JOIN slices s
      ON s.model = r.model AND s.pool = r.pool AND s.provider = coalesce(r.provider, '')
     AND s.region = coalesce(r.region, '') AND s.tier = coalesce(r.tier, '') AND s.team_id = coalesce(r.team_id, '')
     AND s.key_id = r.key_id AND s.endpoint = r.endpoint AND s.outcome = r.outcome
    WHERE r.charge_nano_usd IS NULL
    GROUP BY 1, 2
"""
SET_UNPRICED = """
    UPDATE rollups SET unpriced_tokens = :tokens
    WHERE width_s = :width_s AND bucket_unix_ms = :start_unix_ms AND slice_id = :slice_id
"""


def upgrade() -> None:
    op.add_column("requests", sa.Column("tags", sa.Text(), nullable=True))
    op.add_column("open_requests", sa.Column("tags", sa.Text(), nullable=True))
    op.add_column("rollups", sa.Column("unpriced_tokens", sa.BigInteger(), nullable=False, server_default="0"))
    op.create_table(
        "tag_slices",
        sa.Column("id", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("team_id", sa.Text(), nullable=False),
        sa.Column("key_id", sa.Text(), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("value", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_tag_slices")),
    )
    op.create_index(op.f("ix_tag_slices_key_id"), "tag_slices", ["key_id"])
    op.create_table(
        "tag_rollups",
        *(
            sa.Column(name, sa.BigInteger(), autoincrement=False, nullable=False)
            for name in ("width_s", "bucket_unix_ms", "slice_id")
        ),
        *(
            sa.Column(name, sa.BigInteger(), nullable=False)
            for name in (
                "requests",
                "prompt_tokens",
                "cached_tokens",
                "completion_tokens",
                "charge_nano_usd",
                "unpriced_tokens",
            )
        ),
        sa.PrimaryKeyConstraint("width_s", "bucket_unix_ms", "slice_id", name=op.f("pk_tag_rollups")),
        sqlite_with_rowid=False,
    )
    _fill_unpriced(op.get_bind())


def _fill_unpriced(connection: sa.Connection) -> None:
    for width_s in WIDTHS_S:
        rows = connection.execute(sa.text(UNPRICED), {"width_ms": width_s * 1000}).mappings().all()
        found = [{**row, "tokens": int(row["tokens"]), "width_s": width_s} for row in rows]
        if found:
            connection.execute(sa.text(SET_UNPRICED), found)


def downgrade() -> None:
    op.drop_table("tag_rollups")
    op.drop_table("tag_slices")
    op.drop_column("rollups", "unpriced_tokens")
    op.drop_column("open_requests", "tags")
    op.drop_column("requests", "tags")
