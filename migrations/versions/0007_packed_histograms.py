"""histograms: sequences of 32-bit entries, which merge by concatenation, instead of msgpack maps."""

import struct
from collections.abc import Callable, Sequence

import msgspec
import sqlalchemy as sa
from alembic import op

revision: str = "0007"
down_revision: str | None = "0006"
branch_labels: str | Sequence[str] | None = None
depends_on: str | Sequence[str] | None = None

KEY = ("width_s", "bucket_unix_ms", "slice_id")
MEASURES = ("queue_ms", "ttft_ms", "tpot_ms", "total_ms", "prompt_tokens", "completion_tokens")
HISTOGRAMS = sa.table("histograms", *(sa.column(name) for name in (*KEY, *MEASURES)))
LEAST_BIN = -1000
MOST = 0xFFFF  # values of one entry


def upgrade() -> None:
    convert(to_entries)


def downgrade() -> None:
    convert(to_msgpack)


def convert(recode: Callable[[bytes], bytes]) -> None:
    """Convert every column that is not NULL, one bucket after the other."""
    connection = op.get_bind()
    columns = HISTOGRAMS.c
    of_bucket = sa.and_(*(columns[name] == sa.bindparam(f"of_{name}") for name in KEY[:2]))
    update = (
        sa.update(HISTOGRAMS)
        .where(of_bucket, columns.slice_id == sa.bindparam("of_slice_id"))
        .values({name: sa.bindparam(f"new_{name}", type_=sa.LargeBinary()) for name in MEASURES})
    )
    buckets = connection.execute(sa.select(columns.width_s, columns.bucket_unix_ms).distinct()).all()
    for width_s, start in buckets:
        bucket = {"of_width_s": width_s, "of_bucket_unix_ms": start}
        rows = connection.execute(
            sa.select(columns.slice_id, *(columns[name] for name in MEASURES)).where(of_bucket), bucket
        )
        changed = [
            {
                **bucket,
                "of_slice_id": slice_id,
                **{f"new_{name}": recode(old) if old else None for name, old in zip(MEASURES, stored, strict=True)},
            }
            for slice_id, *stored in rows
        ]
        connection.execute(update, changed)


def to_entries(stored: bytes) -> bytes:
    entries: list[int] = []
    for number, count in sorted(msgspec.msgpack.decode(stored, type=dict[int, int]).items()):
        times, rest = divmod(count, MOST)
        entries += [number - LEAST_BIN << 16 | part for part in (*[MOST] * times, rest) if part]
    return struct.pack(f"<{len(entries)}I", *entries)


def to_msgpack(stored: bytes) -> bytes:
    counts: dict[int, int] = {}
    for entry in struct.unpack(f"<{len(stored) // 4}I", stored):
        number = (entry >> 16) + LEAST_BIN
        counts[number] = counts.get(number, 0) + (entry & MOST)
    return msgspec.msgpack.encode(dict(sorted(counts.items())))
