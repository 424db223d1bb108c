"""Names of keys and teams, which the ledger stores by id."""

from typing import Final

from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncConnection

from db.tables import ApiKeyRow, TeamRow

MAX_NAMES: Final = 20_000  # past it, ids are shown


async def load_names(connection: AsyncConnection) -> dict[str, str]:
    """Load the names of keys and teams, by id. Raises SQL's own errors."""
    names: dict[str, str] = {}
    for row in (ApiKeyRow, TeamRow):
        found = await connection.execute(select(row.id, row.name).order_by(row.created_unix_ms.desc()).limit(MAX_NAMES))
        names.update({one.id: one.name for one in found})
    return names
