"""Selects the payloads that an export reads, and the keys that still allow it."""

from collections.abc import AsyncIterator
from typing import Any

from msgspec import Struct
from sqlalchemy import ColumnElement, and_, func, or_, select
from sqlalchemy.ext.asyncio import AsyncEngine

from db.accounts.principal import Policy, may_train
from db.tables import ApiKeyRow, PayloadRow, RequestRow, TeamRow
from ledger.payloads.store import has_expired

Row = dict[str, Any]


class ExportFilter(Struct, frozen=True):
    """The filters of an export; None: all."""

    until_unix_ms: int  # exclusive
    since_unix_ms: int | None = None
    model: str | None = None
    team_id: str | None = None
    key_id: str | None = None

    def condition(self) -> ColumnElement[bool]:
        """Return the SQL condition that selects the rows."""
        equal = {"model": self.model, "team_id": self.team_id, "key_id": self.key_id}
        columns = PayloadRow.__table__.c
        conditions = [columns[name] == value for name, value in equal.items() if value is not None]
        if self.since_unix_ms is not None:
            conditions.append(columns.received_unix_ms >= self.since_unix_ms)
        return and_(columns.received_unix_ms < self.until_unix_ms, ~has_expired(), *conditions)


async def count_rows(engine: AsyncEngine, filters: ExportFilter) -> int:
    """Return the number of rows. Raises SQLAlchemy's errors."""
    async with engine.connect() as connection:
        return await connection.scalar(select(func.count()).select_from(PayloadRow).where(filters.condition())) or 0


async def read_rows(engine: AsyncEngine, filters: ExportFilter, page_rows: int) -> AsyncIterator[Row]:
    """Yield the rows with outcome and attempts of their requests, oldest first. Raises SQLAlchemy's errors."""
    columns = PayloadRow.__table__.c
    rows = (
        select(PayloadRow.__table__, RequestRow.outcome, RequestRow.attempts)
        .outerjoin(RequestRow, RequestRow.request_id == PayloadRow.request_id)
        .where(filters.condition())
        .order_by(columns.received_unix_ms, columns.request_id)
        .limit(page_rows)
    )
    after: ColumnElement[bool] | None = None
    while True:
        async with engine.connect() as connection:
            page = (await connection.execute(rows if after is None else rows.where(after))).mappings().all()
        for row in page:
            yield dict(row)
        if len(page) < page_rows:
            return
        received_unix_ms, request_id = page[-1]["received_unix_ms"], page[-1]["request_id"]
        same = and_(columns.received_unix_ms == received_unix_ms, columns.request_id > request_id)
        after = or_(columns.received_unix_ms > received_unix_ms, same)


async def consenting_keys(engine: AsyncEngine) -> set[str]:
    """Return the keys, revoked ones included, that allow training now or whose team does. Raises SQL errors."""
    both = select(ApiKeyRow.id, ApiKeyRow.train_ok, TeamRow.train_ok).join(TeamRow, TeamRow.id == ApiKeyRow.team_id)
    async with engine.connect() as connection:
        keys = (await connection.execute(both)).all()
    return {key for key, of_key, of_team in keys if may_train(Policy(train_ok=of_key), Policy(train_ok=of_team))}
