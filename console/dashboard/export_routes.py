"""The page of exports, and the download."""

from datetime import datetime
from typing import Any

from fastapi import APIRouter, Request
from sqlalchemy.ext.asyncio import AsyncConnection
from starlette.responses import Response, StreamingResponse

from console.dashboard.export_files import FORMATS
from console.dashboard.exports import MAX_ROWS
from console.dashboard.render import HEADERS
from console.dashboard.shell import Pages
from console.dashboard.view import View, view_of
from console.login.forms import read_form
from console.rules import person_of
from db.accounts.audit import Change, record
from db.engine import changing
from gateway.errors import InvalidParameter
from ledger.queries.names import load_names
from ledger.queries.traffic import choices, totals


def add_export_pages(router: APIRouter, pages: Pages) -> None:
    """Register the page of exports and the download."""

    @router.get("/exports")
    async def show_exports(request: Request) -> Response:
        async def ask(connection: AsyncConnection, view: View) -> dict[str, Any]:
            (matching,) = await totals(connection, view.window, where=view.filters)
            names = await load_names(connection, view.teams)
            found = await choices(connection, view.window, where=view.scope)
            return {"page": "Exports", "matching": matching, "choices": found, "names": names}

        return await pages.show(request, "exports.html", ask, formats=FORMATS, max_rows=MAX_ROWS)

    @router.post("/exports")
    async def export(request: Request) -> Response:
        view, file_format = view_of(request), (await read_form(request)).get("format", "")
        available = [name for name, one in FORMATS.items() if one.is_available]
        if file_format not in available:
            raise InvalidParameter(f"format: must be one of {', '.join(available)}.", param="format")
        since, until = (
            datetime.fromtimestamp(unix_ms / 1000, view.zone).date()
            for unix_ms in (view.since_unix_ms, view.until_unix_ms)
        )
        name = f"spillway-requests-{since}-{until}.{file_format}"
        headers = {**HEADERS, "content-disposition": f'attachment; filename="{name}"'}
        parts = await pages.exports.start(view, file_format)
        about: dict[str, str] = {"format": file_format, "since": str(since), "until": str(until)} | dict(
            view.where.items()
        )
        if view.tag:
            about["tag"] = view.tag
        async with changing(pages.gateway.database) as connection:
            await record(connection, Change(person_of(request).actor, "export", "requests", None, about))
        return StreamingResponse(parts, headers=headers, media_type=FORMATS[file_format].media_type)
