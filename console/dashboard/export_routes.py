"""The page of exports: start, watch, download."""

from typing import Any

from fastapi import APIRouter, Request
from sqlalchemy.ext.asyncio import AsyncConnection
from starlette.responses import FileResponse, RedirectResponse, Response

from console.dashboard import formats
from console.dashboard.export_files import FORMATS
from console.dashboard.exports import MAX_ROWS
from console.dashboard.names import load_names
from console.dashboard.render import HEADERS
from console.dashboard.shell import Pages
from console.dashboard.view import View, view_of
from console.login.forms import read_form
from gateway.errors import InvalidParameter, UnknownUrl
from ledger.queries.traffic import choices, totals


def add_export_pages(router: APIRouter, pages: Pages) -> None:
    """Register the pages of exports: start, watch, download."""
    exports = pages.exports

    @router.get("/exports")
    async def show_exports(request: Request) -> Response:
        async def ask(connection: AsyncConnection, view: View) -> dict[str, Any]:
            (matching,) = await totals(connection, view.window, where=view.filters)
            names = await load_names(connection)
            found = await choices(connection, view.window)
            return {"page": "Exports", "matching": matching, "choices": found, "names": names}

        shown = {"exports": exports.all(), "formats": FORMATS, "max_rows": MAX_ROWS}
        return await pages.show(request, "exports.html", ask, **shown)

    @router.post("/exports")
    async def start_export(request: Request) -> Response:
        view, file_format = view_of(request), (await read_form(request)).get("format", "")
        available = [name for name, one in FORMATS.items() if one.is_available]
        if file_format not in available:
            raise InvalidParameter(f"format: must be one of {', '.join(available)}.", param="format")
        exports.start(view, file_format, _about(view))
        return RedirectResponse(f"/dashboard/exports?{view.query()}", 303)

    @router.get("/exports/list")
    async def list_exports(request: Request) -> Response:
        return pages.show_memory(request, "export_list.html", {"exports": exports.all(), "formats": FORMATS})

    @router.get("/exports/{export_id}")
    async def download(export_id: str) -> Response:
        export = exports.get(export_id)
        if export.state != "done":
            raise UnknownUrl("This export has no file to download.")
        kind, name = FORMATS[export.format_name], f"spillway-requests-{export.export_id}.{export.format_name}"
        return FileResponse(export.path, headers=HEADERS, media_type=kind.media_type, filename=name)


def _about(view: View) -> str:
    """Describe a view in words."""
    times = f"{formats.moment(view.since_unix_ms, view.zone)} to {formats.moment(view.until_unix_ms, view.zone)}"
    return ", ".join([times, *(f"{dimension} {value}" for dimension, value in view.where.items())])
