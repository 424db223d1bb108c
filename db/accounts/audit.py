"""The audit log: changes and their actors, written in the same transaction as the change."""

import hashlib
import json
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from sqlalchemy import RowMapping, and_, insert, or_, select
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from db.accounts.errors import ChangedMeanwhile, InvalidField
from db.tables import AuditRow

RANDOM_BYTES: Final = 4  # of an entry's id
MAX_PAGE_ROWS: Final = 1000
VERSION_CHARS: Final = 16


@dataclass(frozen=True, slots=True)
class Change:
    """One change; see db.tables.AuditRow. ``before`` and ``after`` hold the changed fields, never a secret."""

    actor: str
    action: str
    subject_id: str
    before: Mapping[str, Any] | None = None
    after: Mapping[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class AuditEntry:
    """A recorded change."""

    id: str
    at_unix_ms: int
    actor: str
    action: str
    subject_id: str
    before: dict[str, Any] | None
    after: dict[str, Any] | None


@dataclass(frozen=True, slots=True)
class AuditFilter:
    """Filter of entries; fields that are None match all."""

    subject_id: str | None = None
    actor: str | None = None
    since_unix_ms: int | None = None
    until_unix_ms: int | None = None  # exclusive
    after_id: str | None = None  # entries after this one in the list: the next page
    subject_ids: frozenset[str] | None = None  # only of these objects


def difference(before: Mapping[str, Any], after: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]] | None:
    """Return the changed fields, before and after; None if no field differs."""
    changed = [field for field in after if before[field] != after[field]]
    return ({f: before[f] for f in changed}, {f: after[f] for f in changed}) if changed else None


def version_of(settings: Mapping[str, Any]) -> str:
    """Return a hash of an object's state. A form keeps it, so that it does not overwrite other changes."""
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:VERSION_CHARS]


def check_version(settings: Mapping[str, Any], version: str | None) -> None:
    """Check that an object has not changed since a form was opened; None: no form. Raises ChangedMeanwhile."""
    if version is not None and version_of(settings) != version:
        raise ChangedMeanwhile(
            "Someone else changed this after you opened the form. Nothing was saved."
            " Reload the page and make your change again."
        )


async def record(connection: AsyncConnection, change: Change) -> None:
    """Add an entry in the transaction of the change. Raises SQL errors."""
    now_unix_ns = time.time_ns()
    row = {
        # Sortable by time, so that changes of the same millisecond keep their order.
        "id": f"aud_{now_unix_ns:016x}{secrets.token_hex(RANDOM_BYTES)}",
        "at_unix_ms": now_unix_ns // 1_000_000,
        "actor": change.actor,
        "action": change.action,
        "subject_id": change.subject_id,
        "before": _json(change.before),
        "after": _json(change.after),
    }
    await connection.execute(insert(AuditRow).values(row))


async def list_changes(engine: AsyncEngine, wanted: AuditFilter, limit: int) -> Sequence[AuditEntry]:
    """Return at most ``limit`` entries, newest first. Raises InvalidField, and SQL errors."""
    columns = AuditRow.__table__.c
    conditions = [
        columns[name] == value
        for name, value in (("subject_id", wanted.subject_id), ("actor", wanted.actor))
        if value is not None
    ]
    if wanted.subject_ids is not None:
        conditions.append(columns.subject_id.in_(sorted(wanted.subject_ids)))
    if wanted.since_unix_ms is not None:
        conditions.append(columns.at_unix_ms >= wanted.since_unix_ms)
    if wanted.until_unix_ms is not None:
        conditions.append(columns.at_unix_ms < wanted.until_unix_ms)
    async with engine.connect() as connection:
        if wanted.after_id is not None:
            last_unix_ms = await connection.scalar(select(columns.at_unix_ms).where(columns.id == wanted.after_id))
            if last_unix_ms is None:
                raise InvalidField("after", "there is no entry with this id")
            same_moment = and_(columns.at_unix_ms == last_unix_ms, columns.id < wanted.after_id)
            conditions.append(or_(columns.at_unix_ms < last_unix_ms, same_moment))
        newest = select(AuditRow.__table__).where(*conditions).order_by(columns.at_unix_ms.desc(), columns.id.desc())
        rows = await connection.execute(newest.limit(limit))
        return [_entry(row) for row in rows.mappings()]


async def values_set_by_others(engine: AsyncEngine, subject_id: str, actor: str) -> dict[str, Any]:
    """Return the last value of each field that other actors than this one have set. Raises SQL's own errors."""
    columns = AuditRow.__table__.c
    by_others = select(columns.after).where(
        columns.subject_id == subject_id, columns.actor != actor, columns.after.is_not(None)
    )
    found: dict[str, Any] = {}
    async with engine.connect() as connection:
        for after in await connection.scalars(by_others.order_by(columns.at_unix_ms, columns.id)):
            found |= json.loads(after)
    return found


def _entry(row: RowMapping) -> AuditEntry:
    values = {name: None if row[name] is None else json.loads(row[name]) for name in ("before", "after")}
    return AuditEntry(**{**row, **values})


def _json(values: Mapping[str, Any] | None) -> str | None:
    return None if values is None else json.dumps(values, sort_keys=True)
