"""Set aside: items that failed repeatedly or cannot be read, each with its reason."""

from typing import Any, Final

from sqlalchemy.ext.asyncio import AsyncConnection

from console.dashboard.pages.requests import read_cursor, write_cursor
from console.dashboard.view import View
from ledger.queries.log import Cursor
from ledger.queries.names import load_names
from ledger.queries.set_aside import set_aside_counts, set_aside_items

PAGE_ROWS: Final = 100
PAGES_OF_KINDS: Final = {"batch": "batches", "request": "requests", "intent": "requests"}  # where an item has a page


async def set_aside(connection: AsyncConnection, view: View, older: str) -> dict[str, Any]:
    """Return the values of set_aside.html: one page of items, those after the cursor ``older``."""
    cursor = read_cursor(older)
    after = None if cursor is None else (cursor.received_unix_ms, cursor.request_id)
    window = (view.since_unix_ms, view.until_unix_ms)
    items = await set_aside_items(connection, *window, after=after, limit=PAGE_ROWS)
    is_full = len(items) == PAGE_ROWS
    return {
        "page": "Set aside",
        "counts": await set_aside_counts(connection, *window),
        "items": items,
        "names": await load_names(connection, view.teams),
        "pages_of_kinds": PAGES_OF_KINDS,
        "older": write_cursor(Cursor(items[-1]["at_unix_ms"], items[-1]["item"])) if is_full else None,
        "is_first": not older,
    }
