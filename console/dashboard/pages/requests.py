"""Requests: a filtered log, page by page or live, and one request with its attempts."""

from collections.abc import Mapping
from typing import Any, Final

from sqlalchemy.ext.asyncio import AsyncConnection

from console.dashboard.formats import NOTHING, moment
from console.dashboard.view import View
from console.dashboard.waterfall import LINKED, facts, links_of, waterfall
from gateway.errors import InvalidParameter, UnknownUrl
from ledger.queries.log import (
    MAX_COMPARED,
    Cursor,
    Extreme,
    RequestHistory,
    extreme_requests,
    request_history,
    request_page,
)
from ledger.queries.names import load_names
from ledger.queries.refusals import Refusal, find_refusal
from ledger.queries.traffic import choices

PAGE_ROWS: Final = 50
ORDERS: Final[Mapping[str, tuple[str, Extreme | None]]] = {  # by name: title, column
    "": ("Newest", None),
    "slowest": ("Slowest", "total_ms"),
    "first-token": ("Slowest first token", "ttft_ms"),
    "waited": ("Longest wait", "queue_ms"),
    "expensive": ("Most expensive", "charge_nano_usd"),
    "attempts": ("Most attempts", "attempts"),
    "longest": ("Longest answers", "completion_tokens"),
}
MAX_CURSOR_CHARS: Final = 200
NOT_ON_RECORD: Final = (
    "Request not found. A running request is recorded within seconds after it ends. If many requests are refused, only"
    " some are recorded one by one. The page Refused counts them all."
)


async def request_log(connection: AsyncConnection, view: View, older: str, order: str) -> dict[str, Any]:
    """Return the values of requests.html. ``order``: of ORDERS. Raises InvalidParameter."""
    if order not in ORDERS:
        raise InvalidParameter(f"order: must be one of {', '.join(filter(None, ORDERS))}.", param="order")
    _, column = ORDERS[order]
    rows = await request_rows(connection, view, older) if column is None else await _extreme(connection, view, column)
    return rows | {
        "order": order,
        "orders": {name: title for name, (title, _) in ORDERS.items()},
        "compared": MAX_COMPARED,
        "page": "Requests",
        "choices": await choices(connection, view.window, where=view.scope),
        "names": await load_names(connection, view.teams),
    }


async def request_rows(connection: AsyncConnection, view: View, older: str) -> dict[str, Any]:
    """Return the values of request_rows.html: one page of requests, those after the cursor ``older``."""
    found = await request_page(
        connection,
        view.since_unix_ms,
        view.until_unix_ms,
        where=view.filters,
        tags=view.tags,
        after=read_cursor(older),
        limit=PAGE_ROWS,
    )
    return {
        "rows": found.requests,
        "older": None if found.next is None else write_cursor(found.next),
        "searched_to": None if found.next is None else found.next.received_unix_ms,
        "is_first": not older,
    }


async def _extreme(connection: AsyncConnection, view: View, column: Extreme) -> dict[str, Any]:
    found = await extreme_requests(
        connection,
        view.since_unix_ms,
        view.until_unix_ms,
        where=view.filters,
        tags=view.tags,
        by=column,
        limit=PAGE_ROWS,
    )
    return {"rows": found, "older": None, "searched_to": None, "is_first": True}


async def request_detail(connection: AsyncConnection, view: View, request_id: str) -> dict[str, Any]:
    """Return the values of request.html, or of refusal.html. Raises UnknownUrl for an id that is not on record."""
    history = await request_history(connection, request_id)
    if history is None:
        refusal = await find_refusal(connection, request_id)
        if refusal is None or not view.sees_team(refusal["team_id"]):
            raise UnknownUrl(NOT_ON_RECORD)
        return await _refused(connection, view, refusal)
    if not view.sees_team(_team_of(history)):
        raise UnknownUrl(NOT_ON_RECORD)
    names = await load_names(connection, view.teams)
    return {
        "page": "Requests",
        "template": "request.html",
        "request_id": request_id,
        "request": history.request,
        "facts": facts(history.request, names, view) if history.request else [],
        "waterfall": waterfall(history),
    }


def _team_of(history: RequestHistory) -> str:
    row = history.request or history.attempts[0]
    return str(row["team_id"])


async def _refused(connection: AsyncConnection, view: View, refusal: Refusal) -> dict[str, Any]:
    names = await load_names(connection, view.teams)
    facts = {
        "Received": moment(refusal["received_unix_ms"], view.zone),
        "Status": str(refusal["status"]),
        "Key": names.get(refusal["key_id"], refusal["key_name"]) or "unknown key",
        "Team": names.get(refusal["team_id"], refusal["team_id"]) or NOTHING,
        "Model": refusal["model"] or NOTHING,
        "Field": refusal["param"] or NOTHING,
        "Request": f"{refusal['method']} {refusal['path']}",
        "From": refusal["client"] or NOTHING,
        "Gateway": refusal["gateway_id"],
    }
    links = links_of(view, key=refusal["key_id"], team=refusal["team_id"])
    shown = [(label, text, links.get(LINKED.get(label, ""), "")) for label, text in facts.items()]
    return {"page": "Refused", "template": "refusal.html", "refusal": refusal, "facts": shown}


def write_cursor(cursor: Cursor) -> str:
    """Encode a cursor for a URL."""
    return f"{cursor.received_unix_ms}.{cursor.request_id}"


def read_cursor(text: str) -> Cursor | None:
    """Parse a cursor of a URL; None for the first page. Raises InvalidParameter."""
    if not text:
        return None
    received, dot, request_id = text[:MAX_CURSOR_CHARS].partition(".")
    if not (dot and received.isascii() and received.isdigit() and len(received) <= 16):
        raise InvalidParameter("older: not a position in the log.", param="older")
    return Cursor(int(received), request_id)
