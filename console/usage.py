"""``GET /admin/v1/usage`` and ``GET /v1/usage``: usage and charges, exact to the nano-dollar.

The second is open to any key and covers that key's requests only. Both read rollups by the pages' reader, outside the
gateway's loop. Callers share one of its two connections, so that they never keep the pages waiting.
"""

import asyncio
import csv
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Annotated, Any, Final, Literal
from zoneinfo import ZoneInfo

from fastapi import APIRouter, Depends, Query, Request, Response
from pydantic import BaseModel, ConfigDict, Field
from sqlalchemy.ext.asyncio import AsyncConnection

from console.admin.service import AdminService
from console.dashboard.reader import Reader
from console.dashboard.view import find_zone, parse_moment
from console.rules import API, person_of
from db.accounts.keyring import KeyRing
from db.accounts.roles import NO_TEAM
from db.money import usd_text
from gateway.errors import InvalidParameter, Overloaded
from gateway.http.pages import exchange_of, json_answer
from ledger.csv_cells import guarded
from ledger.days import NoMonth, month_span, parse_month
from ledger.focus import FOCUS_BY, focus_rows
from ledger.queries.names import load_names
from ledger.queries.traffic import Traffic
from ledger.queries.usage import USAGE_BY, Usage, UsageBy, UsageRefused, usage
from ledger.queries.window import Dimension, Filters, TooManySteps, Window
from protocol.nats.clock import unix_now_ms

MAX_ROWS: Final = 10_000  # of one answer
MAX_VALUE_CHARS: Final = 300
MAX_CALLERS: Final = 8  # keys that wait for their usage; further ones are refused
OWN_BY: Final[tuple[UsageBy, ...]] = ("model", "tag", "day", "month")
DEFAULT_BY: Final = "team"
DEFAULT_OWN_BY: Final = "model"

Text = Annotated[str | None, Field(max_length=MAX_VALUE_CHARS)]


class OwnUsageQuery(BaseModel):
    """The time and the groups of a report. Without a time it is the current month."""

    model_config = ConfigDict(extra="forbid")

    by: Text = None  # separated by commas
    month: Text = None  # 2026-11
    since: Annotated[Text, Field(alias="from")] = None  # a date and time, or Unix milliseconds
    until: Annotated[Text, Field(alias="to")] = None  # exclusive; now
    timezone: Text = "UTC"  # of months, days and times; budgets count months of UTC


class UsageQuery(OwnUsageQuery):
    """The same of all keys, with filters and other formats."""

    team: Text = None  # id or name
    key: Text = None  # likewise
    model: Text = None
    format: Literal["json", "csv", "focus"] = "json"


@dataclass(frozen=True, slots=True)
class _Report:
    """What was asked for, and what the ledger has."""

    window: Window
    by: Sequence[UsageBy]
    rows: Sequence[Usage]
    total: Traffic
    names: Mapping[str, str]  # of teams and keys


def usage_routers(admin: AdminService, keys: KeyRing, reader: Reader) -> list[APIRouter]:
    """Build the routers of both."""
    return [_admin_router(admin, reader), _own_router(keys, reader)]


def _admin_router(admin: AdminService, reader: Reader) -> APIRouter:
    router = APIRouter(prefix=f"{API}/usage", tags=["usage"], dependencies=[Depends(admin.admit)])

    @router.get("")
    async def retrieve_usage(request: Request, query: Annotated[UsageQuery, Query()]) -> Response:
        """Sum up tokens and money `by` team, key, model, tag, day and month; as JSON, CSV or FOCUS."""
        teams = person_of(request).team_ids
        by = _groups(query.by or DEFAULT_BY, USAGE_BY)
        if query.format == "focus":
            by = (*FOCUS_BY, *(name for name in by if name in {"day", "month"}))
        window = _window(query)

        async def ask(connection: AsyncConnection) -> _Report:
            names = await load_names(connection, teams)
            return await _report(connection, window, by, _within(_filters(query, names), teams), names)

        report = await reader.read(ask)
        if query.format == "json":
            return json_answer(_view(report))
        if query.format == "focus":
            return _csv(focus_rows(report.rows, report.names, window), "focus")
        views = [_row_view(row, report) for row in report.rows]
        columns = list(views[0]) if views else []
        return _csv([columns, *(guarded(view, columns) for view in views)], "usage")

    return router


def _own_router(keys: KeyRing, reader: Reader) -> APIRouter:
    router = APIRouter(prefix="/v1/usage", tags=["usage"])
    place, waiting = asyncio.Semaphore(1), 0

    @router.get("")
    async def retrieve_own_usage(request: Request, query: Annotated[OwnUsageQuery, Query()]) -> Response:
        """Sum up the tokens and money of the request's own key, `by` model, tag, day and month."""
        nonlocal waiting
        principal = exchange_of(request).authenticate(keys)
        by, window = _groups(query.by or DEFAULT_OWN_BY, OWN_BY), _window(query)
        where: Filters = {"key": (principal.key_id,)}
        if waiting >= MAX_CALLERS:
            raise Overloaded("Too many usage requests at the moment. Try again.")
        waiting += 1
        try:
            async with place:
                report = await reader.read(lambda connection: _report(connection, window, by, where, {}))
        finally:
            waiting -= 1
        return json_answer({**_view(report), "key_id": principal.key_id})

    return router


async def _report(
    connection: AsyncConnection, window: Window, by: Sequence[UsageBy], where: Filters, names: Mapping[str, str]
) -> _Report:
    try:
        rows = await usage(connection, window, by, where=where)
        [total] = await usage(connection, window, (), where=where)
    except (UsageRefused, TooManySteps) as error:
        raise InvalidParameter(f"{error}.", param="by") from error
    if len(rows) > MAX_ROWS:
        raise InvalidParameter(f"by: more than {MAX_ROWS} rows; narrow the time or the groups.", param="by")
    return _Report(window, by, rows, total.sums, names)


def _groups(text: str, allowed: Sequence[UsageBy]) -> tuple[UsageBy, ...]:
    names = dict.fromkeys(name.strip() for name in text.split(",") if name.strip())
    groups = tuple(group for group in allowed if group in names)
    if len(groups) < len(names):
        raise InvalidParameter(f"by: must be of {', '.join(allowed)}, separated by commas.", param="by")
    return groups


def _window(query: OwnUsageQuery) -> Window:
    """Return the time asked for. Raises InvalidParameter."""
    zone = find_zone(query.timezone or "")
    if zone is None:
        raise InvalidParameter("timezone: must be an IANA name such as Europe/Berlin.", param="timezone")
    now_unix_ms = unix_now_ms()
    if query.since is None and query.until is None:
        return _month(query.month, zone, now_unix_ms)
    if query.month is not None:
        raise InvalidParameter("month: give either a month or from and to.", param="month")
    if query.since is None:
        raise InvalidParameter("from: required beside to.", param="from")
    since = parse_moment("from", query.since, zone)
    until = now_unix_ms if query.until is None else parse_moment("to", query.until, zone)
    if not 0 <= since < until:
        raise InvalidParameter("to: must be later than from.", param="to")
    return Window(since, until, zone)


def _month(month: str | None, zone: ZoneInfo, now_unix_ms: int) -> Window:
    if month is None:
        today = datetime.fromtimestamp(now_unix_ms / 1000, zone)
        span = month_span(today.year, today.month, zone)
    else:
        try:
            span = parse_month(month, zone)
        except NoMonth as error:
            raise InvalidParameter(f"month: {error}.", param="month") from error
    return Window(span.since_unix_ms, span.until_unix_ms, zone)


def _filters(query: UsageQuery, names: Mapping[str, str]) -> Filters:
    """Return the filters by id; a name that is not known is taken for one. Revoked keys may share their name."""
    filters: dict[Dimension, Sequence[str]] = {"model": (query.model,)} if query.model else {}
    asked: tuple[tuple[Dimension, str | None], ...] = (("team", query.team), ("key", query.key))
    for dimension, reference in asked:
        if reference:
            of_name = [one for one, name in names.items() if name == reference and one.startswith(f"{dimension}_")]
            filters[dimension] = of_name or (reference,)
    return filters


def _within(filters: Filters, teams: Sequence[str] | None) -> Filters:
    """Limit filters to the teams that a person sees; None: to no team."""
    if teams is None:
        return filters
    asked = filters.get("team", teams)
    return {**filters, "team": [team for team in asked if team in teams] or NO_TEAM}


def _view(report: _Report) -> dict[str, Any]:
    return {
        "object": "usage",
        "since_unix_ms": report.window.since_unix_ms,
        "until_unix_ms": report.window.until_unix_ms,
        "by": list(report.by),
        "total": _sums_view(report.total),
        "data": [_row_view(row, report) for row in report.rows],
    }


def _row_view(row: Usage, report: _Report) -> dict[str, Any]:
    groups: dict[UsageBy, dict[str, str | None]] = {
        "month": {"month": row.month},
        "day": {"day": row.day},
        "team": {"team_id": row.team_id, "team_name": report.names.get(row.team_id or "")},
        "key": {"key_id": row.key_id, "key_name": report.names.get(row.key_id or "")},
        "model": {"model": row.model},
        "tag": {"tag": row.tag},
    }
    shown = {name: value for group, values in groups.items() if group in report.by for name, value in values.items()}
    return {**shown, **_sums_view(row.sums, is_tagged=row.tag is not None)}


def _sums_view(sums: Traffic, *, is_tagged: bool = False) -> dict[str, Any]:
    outcomes = {} if is_tagged else {"ok": sums.ok, "failed": sums.failed, "cancelled": sums.cancelled}
    return {
        "requests": sums.requests,
        **outcomes,
        "prompt_tokens": sums.prompt_tokens,
        "cached_tokens": sums.cached_tokens,
        "completion_tokens": sums.completion_tokens,
        "unpriced_tokens": sums.unpriced_tokens,
        "charge_nano_usd": sums.charge_nano_usd,
        "charge_usd": usd_text(sums.charge_nano_usd),  # a text: it is exact
    }


def _csv(rows: Sequence[Sequence[object]], name: str) -> Response:
    text = io.StringIO()
    csv.writer(text).writerows(rows)
    headers = {"content-disposition": f'attachment; filename="spillway-{name}.csv"'}
    return Response(text.getvalue(), media_type="text/csv", headers=headers)
