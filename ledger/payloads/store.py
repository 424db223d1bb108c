"""Payloads in SQL: written once, read by operators and exports, deleted on expiry or on request."""

import asyncio
from collections.abc import Collection, Sequence
from typing import Any, Final

import msgspec
from msgspec import Struct
from sqlalchemy import ColumnElement, delete, select
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from db.accounts.audit import Change, record
from db.engine import changing
from db.tables import PayloadRow
from ledger.payloads.end_user import stored_end_user
from ledger.payloads.errors import BrokenPayload, UnknownPayload
from ledger.payloads.sealing import Part, Sealer
from protocol.nats.clock import unix_now_ms
from protocol.usage import PayloadRecord
from protocol.wire import UNDECODABLE

DELETE_ROWS: Final = 500  # per transaction, so that other writers do not wait long


class Payload(Struct, frozen=True):
    """One stored payload, opened."""

    request_id: str
    received_unix_ms: int
    model: str
    endpoint: str
    key_id: str
    team_id: str
    end_user: str | None
    train_ok: bool
    redacted: bool
    expires_unix_ms: int
    dropped: bool
    encoding: str
    request: dict[str, Any] | None  # the body
    choices: list[dict[str, Any]] | None


async def store_payloads(engine: AsyncEngine, records: Sequence[PayloadRecord]) -> None:
    """Insert the records in one transaction, skipping those already stored. Raises SQL errors."""
    rows = [
        {name: value for name, value in msgspec.structs.asdict(record).items() if name != "v"} for record in records
    ]
    insert = postgresql.insert if engine.dialect.name == "postgresql" else sqlite.insert
    async with changing(engine) as connection:
        await connection.execute(insert(PayloadRow).on_conflict_do_nothing(), rows)


async def read_payload(
    engine: AsyncEngine, request_id: str, sealer: Sealer, actor: str, *, team_ids: Collection[str] | None = None
) -> Payload:
    """Read a payload, optionally only of these teams, and record that in the audit log.

    Raises UnknownPayload, ``open_row``'s and SQL errors.
    """
    async with engine.connect() as connection:
        of_request = select(PayloadRow.__table__).where(PayloadRow.request_id == request_id, ~has_expired())
        if team_ids is not None:
            of_request = of_request.where(PayloadRow.team_id.in_(team_ids))
        found = (await connection.execute(of_request)).mappings().first()
    if found is None:
        raise UnknownPayload(f"no payload of {request_id} is stored: either there was no consent, or it was deleted")
    async with changing(engine) as connection:
        await record(connection, Change(actor, "payloads.read", request_id))
    return await asyncio.to_thread(open_row, dict(found), sealer)


def open_row(row: dict[str, Any], sealer: Sealer) -> Payload:
    """Open a row of the table. Raises PayloadKeyMissing or BrokenPayload."""
    request, answer = _opened(row, "request", sealer), _opened(row, "answer", sealer)
    labels = {name: row[name] for name in Payload.__struct_fields__ if name not in {"request", "choices"}}
    return Payload(**labels, request=request, choices=None if answer is None else answer["choices"])


def _opened(row: dict[str, Any], part: Part, sealer: Sealer) -> dict[str, Any] | None:
    sealed = row[part]
    if sealed is None:
        return None
    data = sealer.open(sealed, row["encoding"], row["request_id"], part)
    try:
        return msgspec.json.decode(data, type=dict[str, Any])
    except UNDECODABLE as error:
        raise BrokenPayload(f"the {part} of {row['request_id']} is not JSON: {error}") from error


def has_expired() -> ColumnElement[bool]:
    """Build the condition for expired rows, some of which may not be deleted yet."""
    return PayloadRow.expires_unix_ms <= unix_now_ms()


async def delete_expired(engine: AsyncEngine, batch_rows: int = DELETE_ROWS) -> int:
    """Delete at most ``batch_rows`` expired rows; return how many. Raises SQL errors."""
    async with changing(engine) as connection:
        return await _delete_some(connection, has_expired(), batch_rows)


class Erasure(Struct, frozen=True):
    """The payloads to delete. Exactly one field is set."""

    end_user: str | None = None  # from the clients' field ``user``
    key_id: str | None = None
    request_id: str | None = None

    @property
    def subject(self) -> str:
        """The subject in the audit log, without the end user's name."""
        return "end user" if self.end_user is not None else self.key_id or self.request_id or ""

    def condition(self) -> ColumnElement[bool]:
        """Build the condition for the rows."""
        if self.end_user is not None:
            return PayloadRow.end_user == stored_end_user(self.end_user)
        if self.key_id is not None:
            return PayloadRow.key_id == self.key_id
        return PayloadRow.request_id == self.request_id


async def erase(engine: AsyncEngine, erasure: Erasure, actor: str, *, batch_rows: int = DELETE_ROWS) -> int:
    """Delete all of an erasure, in transactions of ``batch_rows``; return how many. Raises SQL errors."""
    total = 0
    while True:
        async with changing(engine) as connection:
            deleted = await _delete_some(connection, erasure.condition(), batch_rows)
            total += deleted
            if deleted < batch_rows:
                after = {"deleted": total}
                await record(connection, Change(actor, "payloads.delete", erasure.subject, after=after))
                return total


async def _delete_some(connection: AsyncConnection, condition: ColumnElement[bool], batch_rows: int) -> int:
    some = select(PayloadRow.request_id).where(condition).limit(batch_rows)
    return (await connection.execute(delete(PayloadRow).where(PayloadRow.request_id.in_(some)))).rowcount
