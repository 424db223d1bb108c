"""Refused: requests that were not admitted, by code, key, team and model, and the latest ones."""

from functools import partial
from typing import Any, Final

from sqlalchemy.ext.asyncio import AsyncConnection

from console.dashboard.charts import Chart, Line
from console.dashboard.pages.requests import read_cursor, write_cursor
from console.dashboard.view import MAX_VALUE_CHARS, View
from gateway.telemetry.refusal_records import NAMED_A_SECOND, NAMED_A_SECOND_EACH
from ledger.queries.log import Cursor
from ledger.queries.names import load_names
from ledger.queries.refusals import refusal_series, refusal_totals, refusals_by_name
from ledger.queries.window import Window
from ledger.refusals import NAMED_OF_A_KEY

PAGE_ROWS: Final = 50
MAX_GROUPS: Final = 100
MAX_LINES: Final = 5  # of a chart; the other codes are one more


async def refusals(connection: AsyncConnection, view: View, code: str, older: str) -> dict[str, Any]:
    """Return the values of refusals.html: all groups, and one page of the refusals by name after ``older``."""
    window, where = view.window, view.filters
    code = code[:MAX_VALUE_CHARS]
    found = await refusals_by_name(
        connection, window, where=where, code=code, after=read_cursor(older), limit=PAGE_ROWS
    )
    groups = await refusal_totals(connection, window, where=where, by=("code", "status", "key_id", "team_id", "model"))
    last = found[-1] if len(found) == PAGE_ROWS else None
    of_codes: dict[str, int] = {}
    for (group_code, *_), number in groups.items():
        of_codes[group_code] = of_codes.get(group_code, 0) + number
    return {
        "page": "Refused",
        "names": await load_names(connection, view.teams),
        "choices": await _choices(connection, view),
        "codes": sorted(of_codes.items(), key=lambda item: (-item[1], item[0])),
        "code": code,
        "total": sum(of_codes.values()),
        "groups": list(groups.items())[:MAX_GROUPS],
        "more_groups": max(0, len(groups) - MAX_GROUPS),
        "charts": [await refusal_chart(connection, view, window.steps(view.step))],
        "rows": found,
        "older": None if last is None else write_cursor(Cursor(last["received_unix_ms"], last["request_id"])),
        "is_first": not older,
        "kept": NAMED_OF_A_KEY,
        "named_a_second": (NAMED_A_SECOND_EACH, NAMED_A_SECOND),
    }


async def refusal_chart(connection: AsyncConnection, view: View, steps: list[Window]) -> Chart:
    """Return the chart of refusals by code."""
    found = await refusal_series(connection, steps, where=view.filters)
    codes = sorted(found, key=lambda code: (-sum(found[code]), code))
    lines = [Line(code, found[code], number, bars=True) for number, code in enumerate(codes[:MAX_LINES], 1)]
    if codes[MAX_LINES:]:
        others = [sum(values) for values in zip(*(found[code] for code in codes[MAX_LINES:]), strict=True)]
        lines.append(Line("other codes", others, MAX_LINES + 1, bars=True))
    return Chart("Refused", "requests", steps, lines, view, path="/dashboard/refusals")


async def _choices(connection: AsyncConnection, view: View) -> dict[str, list[str]]:
    asked = partial(refusal_totals, connection, view.window, where=view.scope)
    return {
        "model": sorted(name for (name,) in await asked(by=("model",)) if name),
        "team": sorted(name for (name,) in await asked(by=("team_id",)) if name),
        "key": sorted(name for (name,) in await asked(by=("key_id",)) if name),
    }
