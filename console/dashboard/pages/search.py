"""Search: an id or a name in the box of every page, and the page that it leads to."""

from collections.abc import Mapping
from typing import Final
from urllib.parse import quote

from sqlalchemy import func, or_, select, true
from sqlalchemy.ext.asyncio import AsyncConnection

from console.dashboard.view import MAX_VALUE_CHARS, View
from db.tables import ApiKeyRow, TeamRow

PAGES_OF_PREFIXES: Final[Mapping[str, str]] = {"req_": "/dashboard/requests/", "batch_": "/dashboard/batches/"}


async def find_page(connection: AsyncConnection, view: View, text: str) -> str | None:
    """Return the URL of the request or batch (by id), key or team (by id or name) that ``text`` names; None: no match.

    Of several keys of one name the newest counts: a name is used again once its key is revoked.
    """
    text = text.strip()[:MAX_VALUE_CHARS]
    for prefix, page in PAGES_OF_PREFIXES.items():
        if text.startswith(prefix):
            return f"{page}{quote(text, safe='')}"
    for dimension, row, team_id in (("key", ApiKeyRow, ApiKeyRow.team_id), ("team", TeamRow, TeamRow.id)):
        named = or_(row.id == text, func.lower(row.name) == text.lower())
        seen = true() if view.teams is None else team_id.in_(view.teams)
        found = await connection.scalar(select(row.id).where(named, seen).order_by(row.created_unix_ms.desc()).limit(1))
        if found is not None:
            others = dict.fromkeys(view.where)
            return f"/dashboard/requests?{view.query(**others | {dimension: found, 'by': None, 'and': None})}"
    return None
