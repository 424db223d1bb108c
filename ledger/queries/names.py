"""Names of keys and teams, which the ledger stores by id."""

from collections.abc import Sequence
from typing import Final

from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncConnection

from db.tables import ApiKeyRow, TeamRow

MAX_NAMES: Final = 20_000  # past it, ids are shown


async def load_names(connection: AsyncConnection, teams: Sequence[str] | None = None) -> dict[str, str]:
    """Load the names of keys and teams, by id; ``teams``: of these alone. Raises SQL errors."""
    names: dict[str, str] = {}
    for row, team_id in ((ApiKeyRow, ApiKeyRow.team_id), (TeamRow, TeamRow.id)):
        newest = select(row.id, row.name).order_by(row.created_unix_ms.desc()).limit(MAX_NAMES)
        found = await connection.execute(newest if teams is None else newest.where(team_id.in_(teams)))
        names.update({one.id: one.name for one in found})
    return names
