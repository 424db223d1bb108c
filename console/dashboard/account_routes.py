"""The pages of keys and teams: list, create, change, rotate, revoke, by the operations of the admin API."""

import logging
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final
from urllib.parse import urlencode

from fastapi import APIRouter, Request
from sqlalchemy.ext.asyncio import AsyncConnection
from starlette.responses import RedirectResponse, Response

from console.admin.schema import KeyChanges, NewKey, NewTeam, Rotation, TeamChanges
from console.dashboard.account_forms import NEW_KEY, NEW_TEAM, form_errors, key_fields, parse_form, team_fields
from console.dashboard.pages.keys import Accounts, account_lines, ranked
from console.dashboard.shell import Pages
from console.dashboard.view import View, view_of
from console.login.forms import read_form
from db.accounts.audit import AuditFilter, list_changes
from db.accounts.errors import PrincipalError
from db.accounts.keys import DEFAULT_GRACE_S, find_key, list_keys
from db.accounts.principal import SCOPES
from db.accounts.teams import find_team, list_teams
from gateway.api.fields import parse_body
from gateway.errors import Refused
from gateway.limits.account import AccountStore
from gateway.limits.report import load_usage
from protocol.errors import BusError, ProtocolError
from protocol.nats.clock import unix_now_ms

LIST: Final = "/dashboard/keys"
SHOWN_CHANGES: Final = 10  # of one key's or team's audit log
GRACES_S: Final = {"a day": 86_400, "an hour": 3_600, "a week": 7 * 86_400, "no time at all": 0}
CHOICES: Final = {"SCOPES": SCOPES, "GRACES_S": GRACES_S}

log = logging.getLogger(__name__)


def add_account_pages(router: APIRouter, pages: Pages) -> None:
    """Register the pages at /dashboard/keys and /dashboard/teams."""
    views = _AccountViews(pages)
    _add_list(router, views)
    _add_teams(router, views)
    _add_keys(router, views)


class _AccountViews:
    """Shows keys and teams with the use of their limits."""

    def __init__(self, pages: Pages) -> None:
        self.pages = pages
        self.admin = pages.admin
        self.database = pages.gateway.database
        self._account_store = AccountStore(pages.gateway.bus)

    def actor(self, request: Request) -> str:
        """Return the user's name in the audit log."""
        return self.pages.user(request).actor

    async def show_list(self, request: Request, **more: object) -> Response:
        """Show all keys and teams; ``invalid_form`` is the form that ``errors``, by field, belong to."""
        keys, teams = await list_keys(self.database, include_revoked=True), await list_teams(self.database)
        forms = {"new_key": NEW_KEY, "new_team": NEW_TEAM, "invalid_form": "", "errors": {}, "teams": teams}
        values = {"token": None, "changed": "", **forms, **more}
        return await self._show(request, "keys.html", ranked(keys, teams, unix_now_ms()), values)

    async def show_team(self, request: Request, reference: str, **more: object) -> Response:
        """Show a team with its form. Raises UnknownTeam."""
        async with self.database.connect() as connection:
            team = await find_team(connection, reference)
        accounts = Accounts((), (team,), 0, unix_now_ms())
        shown = {"form": team_fields(team), "webhooks": await self.admin.webhooks.list(team.team_id)}
        return await self._show_one(request, accounts, team.team_id, {**shown, **more})

    async def show_key(self, request: Request, reference: str, **more: object) -> Response:
        """Show a key with its form. Raises UnknownKey."""
        key = await find_key(self.database, reference)
        accounts = Accounts((key,), (), 0, unix_now_ms())
        shown = {"form": key_fields(key, view_of(request)), "teams": await list_teams(self.database)}
        return await self._show_one(request, accounts, key.key_id, {**shown, **more})

    async def _show_one(
        self, request: Request, accounts: Accounts, account_id: str, more: Mapping[str, object]
    ) -> Response:
        changes = await list_changes(self.database, AuditFilter(subject_id=account_id), SHOWN_CHANGES)
        return await self._show(
            request, "account.html", accounts, {"changes": changes, "webhooks": (), "errors": {}, **more}
        )

    async def _show(self, request: Request, template: str, accounts: Accounts, more: Mapping[str, object]) -> Response:
        now_s = accounts.at_unix_ms / 1000
        try:
            accounts = replace(accounts, usage=await load_usage(self._account_store, accounts.terms, now_s))
        except (BusError, ProtocolError) as error:
            log.warning("cannot show the use of limits, except budgets from the ledger: %s", error)

        async def ask(connection: AsyncConnection, view: View) -> dict[str, Any]:
            values = await account_lines(connection, view, accounts)
            return {**values, "warnings": accounts.warnings(unpriced)}

        unpriced = await self.admin.unpriced()
        return await self.pages.show(request, template, ask, **CHOICES, **more)


def _add_list(router: APIRouter, views: _AccountViews) -> None:
    @router.get("/keys")
    async def show_accounts(request: Request, changed: str = "") -> Response:
        return await views.show_list(request, changed=changed)

    @router.post("/keys")
    async def create_key(request: Request) -> Response:
        form = await read_form(request)
        try:
            key, token = await views.admin.create_key(parse_form(NewKey, form, view_of(request)), views.actor(request))
        except (PrincipalError, Refused) as error:
            return await views.show_list(request, invalid_form="key", errors=form_errors(error), new_key=form)
        return await views.show_list(request, token=token, token_of=key.name)

    @router.post("/teams")
    async def create_team(request: Request) -> Response:
        form = await read_form(request)
        try:
            team = await views.admin.create_team(parse_form(NewTeam, form, view_of(request)), views.actor(request))
        except (PrincipalError, Refused) as error:
            return await views.show_list(request, invalid_form="team", errors=form_errors(error), new_team=form)
        return _changed(team.team_id)


def _add_teams(router: APIRouter, views: _AccountViews) -> None:
    @router.get("/teams/{team_id}")
    async def show_team(request: Request, team_id: str) -> Response:
        return await views.show_team(request, team_id)

    @router.post("/teams/{team_id}")
    async def change_team(request: Request, team_id: str) -> Response:
        form, view = await read_form(request), view_of(request)
        async with views.database.connect() as connection:
            before = team_fields(await find_team(connection, team_id))
        try:
            await views.admin.update_team(team_id, parse_form(TeamChanges, form, view, before), views.actor(request))
        except (PrincipalError, Refused) as error:
            return await views.show_team(request, team_id, form=form, errors=form_errors(error))
        return _changed(team_id)


def _add_keys(router: APIRouter, views: _AccountViews) -> None:
    @router.get("/keys/{key_id}")
    async def show_key(request: Request, key_id: str) -> Response:
        return await views.show_key(request, key_id)

    @router.post("/keys/{key_id}")
    async def change_key(request: Request, key_id: str) -> Response:
        form, view = await read_form(request), view_of(request)
        before = key_fields(await find_key(views.database, key_id), view)
        try:
            await views.admin.update_key(key_id, parse_form(KeyChanges, form, view, before), views.actor(request))
        except (PrincipalError, Refused) as error:
            return await views.show_key(request, key_id, form=form, errors=form_errors(error))
        return _changed(key_id)

    @router.post("/keys/{key_id}/rotate")
    async def rotate_key(request: Request, key_id: str) -> Response:
        grace_s = (await read_form(request)).get("grace_s") or DEFAULT_GRACE_S
        body = parse_body(Rotation, f'{{"grace_s": {grace_s}}}'.encode())
        key, token = await views.admin.rotate_key(key_id, body.grace_s, views.actor(request))
        return await views.show_list(request, token=token, token_of=key.name)

    @router.post("/keys/{key_id}/revoke")
    async def revoke_key(request: Request, key_id: str) -> Response:
        stops_running = (await read_form(request)).get("stop_running") == "on"
        await views.admin.revoke_key(key_id, views.actor(request), stops_running=stops_running)
        return _changed(key_id)


def _changed(account_id: str) -> Response:
    """Redirect to the list, which shows the change; reloading it does not repeat the change."""
    return RedirectResponse(f"{LIST}?{urlencode({'changed': account_id})}", 303)
