"""Adding requests' tags to the tags' rollups: spending by tag and key.

Clients can send any tags, even new ones with each request, so stored tags are limited per key: the first
``MAX_NAMES`` names, and the first ``MAX_VALUES`` values per name. A further value counts as ``OTHER`` of its name, a
further name as ``OTHER``. Tags of a key are never deleted: a removed request is subtracted
from the tag to which it was added.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from typing import Any, Final

import msgspec
from sqlalchemy import and_, delete, select
from sqlalchemy.ext.asyncio import AsyncConnection

from db.tables import TagRollupRow, TagSliceRow
from ledger.rollups import WIDTHS_S, Row, chunks, slice_id, unpriced_tokens, upsert

TAG_WIDTHS_S: Final = WIDTHS_S[1:]  # no page shows tags by minute
MAX_NAMES: Final = 32  # of one key
MAX_VALUES: Final = 100  # of one name of one key
OTHER: Final = "(other)"
SUMS: Final = (
    "requests",
    "prompt_tokens",
    "cached_tokens",
    "completion_tokens",
    "charge_nano_usd",
    "unpriced_tokens",
)

TagSlice = tuple[str, str, str, str]  # team_id, key_id, name, value
_decoder: Final = msgspec.json.Decoder(dict[str, str])


class TagDelta:
    """The change of the tags' rollups by added or removed requests."""

    def __init__(self) -> None:
        self._sums: dict[tuple[int, TagSlice], list[int]] = defaultdict(lambda: [0] * len(SUMS))  # by quarter and tag
        self.takes_away = False

    def add(self, rows: Iterable[Row], sign: int = 1) -> None:
        """Add rows (1) or remove them (-1)."""
        self.takes_away = self.takes_away or sign < 0
        width_ms = TAG_WIDTHS_S[0] * 1000
        for row in rows:
            for name, value in _decoder.decode(row["tags"]).items() if row["tags"] else ():
                bucket = row["received_unix_ms"] // width_ms * width_ms
                sums = self._sums[bucket, (row["team_id"] or "", row["key_id"], name, value)]
                for number, amount in enumerate(_values(row)):
                    sums[number] += sign * amount

    def tags(self) -> set[TagSlice]:
        """Return all changed tags."""
        return {tag for _, tag in self._sums}

    def buckets(self, kept: Mapping[TagSlice, TagSlice]) -> dict[tuple[int, int, int], list[int]]:
        """Return sums by width, bucket and slice; ``kept``: the stored tag for each tag."""
        ids = {tag: slice_id(as_kept) for tag, as_kept in kept.items()}
        found: dict[tuple[int, int, int], list[int]] = defaultdict(lambda: [0] * len(SUMS))
        for (quarter, tag), sums in self._sums.items():
            for width_s in TAG_WIDTHS_S:
                into = found[width_s, quarter // (width_s * 1000) * (width_s * 1000), ids[tag]]
                into[:] = map(int.__add__, into, sums)
        return found


def _values(row: Row) -> tuple[int, ...]:
    """Return a row's figures in the order of SUMS."""
    tokens = (row["prompt_tokens"], row["cached_tokens"], row["completion_tokens"])
    return (1, *tokens, row["charge_nano_usd"] or 0, unpriced_tokens(row))


async def apply_tags(connection: AsyncConnection, delta: TagDelta) -> None:
    """Write a change in the caller's transaction, which must keep other writers out (db.engine.writing)."""
    if not delta.tags():
        return
    kept = await kept_tags(connection, delta.tags())
    columns = ("team_id", "key_id", "name", "value")
    slices = [{"id": slice_id(tag), **dict(zip(columns, tag, strict=True))} for tag in sorted(set(kept.values()))]
    await upsert(connection, TagSliceRow, slices)
    names = ("width_s", "bucket_unix_ms", "slice_id")
    buckets = sorted(delta.buckets(kept).items())
    rows = [{**dict(zip(names, key, strict=True)), **dict(zip(SUMS, sums, strict=True))} for key, sums in buckets]
    stored = TagRollupRow.__table__.columns
    await upsert(connection, TagRollupRow, rows, lambda new: {name: stored[name] + new[name] for name in SUMS})
    for width_s, start in {key[:2] for key, _ in buckets} if delta.takes_away else ():
        here = and_(TagRollupRow.width_s == width_s, TagRollupRow.bucket_unix_ms == start)
        await connection.execute(delete(TagRollupRow).where(here, TagRollupRow.requests == 0))


async def kept_tags(connection: AsyncConnection, tags: Iterable[TagSlice]) -> dict[TagSlice, TagSlice]:
    """Return the stored tag for each tag: itself if it is known or below the limit, else OTHER."""
    wanted = {slice_id(tag): tag for tag in tags}
    known: set[int] = set()
    for chunk in chunks(list(wanted)):
        known.update(await connection.scalars(select(TagSliceRow.id).where(TagSliceRow.id.in_(chunk))))
    new = sorted(tag for number, tag in wanted.items() if number not in known)
    values = await _known_values(connection, {key_id for _, key_id, _, _ in new})
    kept = {tag: tag for number, tag in wanted.items() if number in known}
    for tag in new:
        kept[tag] = _admitted(tag, values[tag[1]])
    return kept


def _admitted(tag: TagSlice, values: Counter[str]) -> TagSlice:
    """Return the tag, or OTHER above the key's limits. Updates ``values``, the counts by name."""
    team_id, key_id, name, value = tag
    if name == OTHER or (name not in values and len(values) >= MAX_NAMES):
        return team_id, key_id, OTHER, OTHER
    if value == OTHER or values[name] >= MAX_VALUES:
        values[name] += 0
        return team_id, key_id, name, OTHER
    values[name] += 1
    return tag


async def _known_values(connection: AsyncConnection, key_ids: Iterable[str]) -> dict[str, Counter[str]]:
    """Return the number of values by key and name, without OTHER."""
    found: dict[str, Counter[str]] = defaultdict(Counter)
    columns = (TagSliceRow.key_id, TagSliceRow.name, TagSliceRow.value)
    for chunk in chunks(sorted(key_ids)):
        statement = select(*columns).where(TagSliceRow.key_id.in_(chunk), TagSliceRow.name != OTHER)
        for key_id, name, value in await connection.execute(statement):
            found[key_id][name] += value != OTHER
    return found


async def replace_tags(connection: AsyncConnection, since_unix_ms: int, until_unix_ms: int, delta: TagDelta) -> None:
    """Replace the rollups of whole UTC days. Call inside ``writing``."""
    start = TagRollupRow.bucket_unix_ms
    await connection.execute(delete(TagRollupRow).where(start >= since_unix_ms, start < until_unix_ms))
    await apply_tags(connection, delta)


async def wrong_tags(connection: AsyncConnection, since_unix_ms: int, until_unix_ms: int, delta: TagDelta) -> int:
    """Count the rows of whole UTC days that differ from the sums of ``delta``."""
    columns = TagRollupRow.__table__.columns
    start = columns.bucket_unix_ms
    names = ("width_s", "bucket_unix_ms", "slice_id", *SUMS)
    statement = select(*(columns[name] for name in names)).where(start >= since_unix_ms, start < until_unix_ms)
    stored: dict[tuple[Any, ...], list[int]] = {
        tuple(row[:3]): list(row[3:]) for row in await connection.execute(statement)
    }
    counted = delta.buckets(await kept_tags(connection, delta.tags()))
    return sum(stored.pop(key, None) != sums for key, sums in counted.items()) + len(stored)
