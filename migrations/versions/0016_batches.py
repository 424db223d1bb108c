"""batches: files, their parts, and batches."""

from collections.abc import Sequence

import sqlalchemy as sa
from alembic import op

revision: str = "0016"
down_revision: str | None = "0015"
branch_labels: str | Sequence[str] | None = None
depends_on: str | Sequence[str] | None = None


def upgrade() -> None:
    op.create_table(
        "files",
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("tenant", sa.Text(), nullable=False),
        sa.Column("key_id", sa.Text(), nullable=False),
        sa.Column("created_unix_ms", sa.BigInteger(), nullable=False),
        sa.Column("expires_unix_ms", sa.BigInteger(), nullable=False),
        sa.Column("purpose", sa.Text(), nullable=False),
        sa.Column("filename", sa.Text(), nullable=False),
        sa.Column("size_bytes", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_files")),
    )
    op.create_index(op.f("ix_files_tenant_created_unix_ms"), "files", ["tenant", "created_unix_ms"])
    op.create_index(op.f("ix_files_expires_unix_ms"), "files", ["expires_unix_ms"])
    op.create_table(
        "file_parts",
        sa.Column("file_id", sa.Text(), nullable=False),
        sa.Column("number", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("object_name", sa.Text(), nullable=False),
        sa.Column("size_bytes", sa.BigInteger(), nullable=False),
        sa.Column("lines", sa.LargeBinary(), nullable=True),
        sa.PrimaryKeyConstraint("file_id", "number", name=op.f("pk_file_parts")),
    )
    create_batches()


def create_batches() -> None:
    texts = ("id", "surface", "tenant", "team_id", "key_id", "key_name", "endpoint", "input_file_id")
    op.create_table(
        "batches",
        *(sa.Column(name, sa.Text(), nullable=False) for name in texts),
        sa.Column("output_file_id", sa.Text(), nullable=True),
        sa.Column("error_file_id", sa.Text(), nullable=True),
        sa.Column("completion_window", sa.Text(), nullable=False),
        sa.Column("custom_metadata", sa.Text(), nullable=True),
        sa.Column("result_ttl_s", sa.BigInteger(), nullable=True),
        sa.Column("status", sa.Text(), nullable=False),
        sa.Column("errors", sa.Text(), nullable=True),
        sa.Column("created_unix_ms", sa.BigInteger(), nullable=False),
        sa.Column("expires_unix_ms", sa.BigInteger(), nullable=False),
        sa.Column("in_progress_unix_ms", sa.BigInteger(), nullable=True),
        sa.Column("finalizing_unix_ms", sa.BigInteger(), nullable=True),
        sa.Column("cancelling_unix_ms", sa.BigInteger(), nullable=True),
        sa.Column("over_unix_ms", sa.BigInteger(), nullable=True),
        sa.Column("total", sa.BigInteger(), nullable=False),
        sa.Column("completed", sa.BigInteger(), nullable=False),
        sa.Column("failed", sa.BigInteger(), nullable=False),
        sa.Column("prompt_tokens", sa.BigInteger(), nullable=False),
        sa.Column("cached_tokens", sa.BigInteger(), nullable=False),
        sa.Column("completion_tokens", sa.BigInteger(), nullable=False),
        sa.Column("models", sa.Text(), nullable=True),
        sa.Column("epoch", sa.BigInteger(), nullable=False),
        sa.Column("holder", sa.Text(), nullable=True),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_batches")),
    )
    op.create_index(op.f("ix_batches_tenant_created_unix_ms"), "batches", ["tenant", "created_unix_ms"])
    op.create_index(op.f("ix_batches_status"), "batches", ["status"])


def downgrade() -> None:
    op.drop_index(op.f("ix_batches_status"), "batches")
    op.drop_index(op.f("ix_batches_tenant_created_unix_ms"), "batches")
    op.drop_table("batches")
    op.drop_table("file_parts")
    op.drop_index(op.f("ix_files_expires_unix_ms"), "files")
    op.drop_index(op.f("ix_files_tenant_created_unix_ms"), "files")
    op.drop_table("files")
