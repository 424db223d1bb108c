"""The pages that change something: keys and exports."""

from typing import Any

from fastapi import APIRouter, Request
from sqlalchemy.ext.asyncio import AsyncConnection
from starlette.responses import FileResponse, RedirectResponse, Response

from gateway.api.errors import ApiError, InvalidParameter, UnknownUrl
from gateway.auth import keys, teams
from gateway.auth.errors import PrincipalError
from gateway.dashboard import formats
from gateway.dashboard.export_files import FORMATS
from gateway.dashboard.exports import MAX_ROWS
from gateway.dashboard.names import load_names
from gateway.dashboard.pages.keys import key_from_form, key_lines
from gateway.dashboard.render import HEADERS
from gateway.dashboard.shell import Pages
from gateway.dashboard.view import View, view_of
from gateway.ledger.queries.traffic import choices, totals
from gateway.web.forms import read_form


def add_key_pages(router: APIRouter, pages: Pages) -> None:
    """Keys: list, create, rotate, revoke. A plaintext is in the answer that makes it, and nowhere else."""
    database, settings = pages.services.database, pages.services.settings

    async def show(request: Request, **more: object) -> Response:
        found, known_teams = await keys.list_keys(database, include_revoked=True), await teams.list_teams(database)

        async def ask(connection: AsyncConnection, view: View) -> dict[str, Any]:
            return {**await key_lines(connection, view, found), "teams": known_teams}

        return await pages.show(request, "keys.html", ask, **{"problem": None, "token": None, "form": {}, **more})

    @router.get("/keys")
    async def show_keys(request: Request) -> Response:
        return await show(request)

    @router.post("/keys")
    async def create_key(request: Request) -> Response:
        form = await read_form(request)
        try:
            key, token = await key_from_form(database, settings, form, pages.user(request).actor)
        except (PrincipalError, ApiError) as error:
            return await show(request, problem=str(error), form=form)
        await pages.tell_gateways()
        return await show(request, token=token, token_of=key.name)

    @router.post("/keys/{key_id}/rotate")
    async def rotate_key(request: Request, key_id: str) -> Response:
        try:
            key, token = await keys.rotate_key(database, key_id, settings.key_pepper, pages.user(request).actor)
        except PrincipalError as error:
            return await show(request, problem=str(error))
        await pages.tell_gateways()
        return await show(request, token=token, token_of=key.name)

    @router.post("/keys/{key_id}/revoke")
    async def revoke_key(request: Request, key_id: str) -> Response:
        try:
            await keys.revoke_key(database, key_id, pages.user(request).actor)
        except PrincipalError as error:
            return await show(request, problem=str(error))
        await pages.tell_gateways()
        return RedirectResponse("/dashboard/keys", 303)


def add_export_pages(router: APIRouter, pages: Pages) -> None:
    """Exports: begin, watch, download."""
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
        view, wanted = view_of(request), (await read_form(request)).get("format", "")
        if wanted not in FORMATS or not FORMATS[wanted].is_there:
            there = ", ".join(name for name, file_format in FORMATS.items() if file_format.is_there)
            raise InvalidParameter(f"format: must be one of {there}.", param="format")
        exports.start(view, wanted, _about(view))
        return RedirectResponse(f"/dashboard/exports?{view.query()}", 303)

    @router.get("/exports/list")
    async def list_exports(request: Request) -> Response:
        return pages.show_memory(request, "export_list.html", {"exports": exports.all(), "formats": FORMATS})

    @router.get("/exports/{export_id}")
    async def download(export_id: str) -> Response:
        export = exports.get(export_id)
        if export.state != "done":
            raise UnknownUrl("This export is not there to be downloaded.")
        kind, name = FORMATS[export.format_name], f"spillway-requests-{export.export_id}.{export.format_name}"
        return FileResponse(export.path, headers=HEADERS, media_type=kind.media_type, filename=name)


def _about(view: View) -> str:
    """What a view shows, in words."""
    times = f"{formats.moment(view.since_unix_ms, view.zone)} to {formats.moment(view.until_unix_ms, view.zone)}"
    return ", ".join([times, *(f"{dimension} {value}" for dimension, value in view.where.items())])
