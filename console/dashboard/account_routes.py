"""The pages of keys and teams: list, create, change, rotate, revoke, by the operations of the admin API."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Final
from urllib.parse import urlencode

from fastapi import APIRouter, Request
from sqlalchemy.ext.asyncio import AsyncConnection
from starlette.responses import RedirectResponse, Response

from console.admin.schema import KeyChanges, NewKey, NewTeam, Rotation, TeamChanges
from console.dashboard.account_forms import NEW_KEY, NEW_TEAM, form_errors, key_fields, parse_form, team_fields
from console.dashboard.audit_words import in_words
from console.dashboard.pages.keys import Accounts, account_lines, ranked
from console.dashboard.playground import calls
from console.dashboard.shell import Pages
from console.dashboard.view import View, view_of
from console.login.forms import read_form
from console.rules import person_of
from db.accounts.audit import AuditEntry, AuditFilter, list_changes
from db.accounts.errors import ChangedMeanwhile, PrincipalError
from db.accounts.keys import DEFAULT_GRACE_S
from db.accounts.principal import SCOPES
from db.accounts.roles import Person
from gateway.api.fields import parse_body
from gateway.errors import Refused
from gateway.limits.account import AccountStore
from gateway.limits.report import load_usage
from protocol.errors import BusError, ProtocolError
from protocol.nats.clock import unix_now_ms

LIST: Final = "/dashboard/keys"
SHOWN_CHANGES: Final = 10  # of one key's or team's audit log
GRACES_S: Final = {"a day": 86_400, "an hour": 3_600, "a week": 7 * 86_400, "no time": 0}
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

    async def show_list(self, request: Request, **more: object) -> Response:
        """Show all keys and teams; ``invalid_form`` is the form that ``errors``, by field, belong to."""
        who = person_of(request)
        keys, teams = await self.admin.list_keys(who, include_revoked=True), await self.admin.list_teams(who)
        forms = {"new_key": NEW_KEY, "new_team": NEW_TEAM, "invalid_form": "", "errors": {}, "teams": teams}
        models = self.pages.live.models()
        forms["calls"] = calls(self.pages.endpoint(request), next(iter(models), "MODEL"))
        values = {"token": None, "changed": "", **forms, **more}
        return await self._show(request, "keys.html", ranked(keys, teams, unix_now_ms()), values)

    async def show_team(self, request: Request, reference: str, **more: object) -> Response:
        """Show a team, with its form if this person may change it. Raises UnknownTeam."""
        who = person_of(request)
        team = await self.admin.find_team(reference, who)
        accounts = Accounts((), (team,), 0, unix_now_ms())
        shown = {"form": team_fields(team), "webhooks": await self.admin.list_webhooks(who, team.team_id)}
        return await self._show_one(request, accounts, team.team_id, {**shown, **more})

    async def show_key(self, request: Request, reference: str, **more: object) -> Response:
        """Show a key, with its form if this person may change it. Raises UnknownKey."""
        who = person_of(request)
        key = await self.admin.find_key(reference, who)
        accounts = Accounts((key,), (), 0, unix_now_ms())
        shown = {"form": key_fields(key, view_of(request)), "teams": await self.admin.list_teams(who)}
        return await self._show_one(request, accounts, key.key_id, {**shown, **more})

    async def _show_one(
        self, request: Request, accounts: Accounts, account_id: str, more: Mapping[str, object]
    ) -> Response:
        found = await self._changes(person_of(request), account_id)
        names = {one.key_id: one.name for one in accounts.keys} | {one.team_id: one.name for one in accounts.teams}
        view = view_of(request)
        changes = None if found is None else [in_words(entry, names, view) for entry in found]
        return await self._show(
            request, "account.html", accounts, {"changes": changes, "webhooks": (), "errors": {}, **more}
        )

    async def _changes(self, who: Person, account_id: str) -> Sequence[AuditEntry] | None:
        """Return the latest changes of a key or team; None: not for this person."""
        if not who.may("see_audit"):
            return None
        wanted = AuditFilter(subject_id=account_id, subject_ids=await self.admin.audited_subjects(who))
        return await list_changes(self.database, wanted, SHOWN_CHANGES)

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
        form, person = await read_form(request), person_of(request)
        try:
            given = form if person.team_ids is None else NEW_KEY | form  # the form has not all fields
            key, token = await views.admin.create_key(parse_form(NewKey, given, view_of(request)), person)
        except (PrincipalError, Refused) as error:
            return await views.show_list(request, invalid_form="key", errors=form_errors(error), new_key=form)
        return await views.show_list(request, token=token, token_of=key.name)

    @router.post("/teams")
    async def create_team(request: Request) -> Response:
        form = await read_form(request)
        try:
            team = await views.admin.create_team(parse_form(NewTeam, form, view_of(request)), person_of(request))
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
        who = person_of(request)
        before = team_fields(await views.admin.find_team(team_id, who))
        try:
            body = parse_form(TeamChanges, form, view, before)
            await views.admin.update_team(team_id, body, who, form.get("version"))
        except (PrincipalError, Refused) as error:
            shown = await views.show_team(request, team_id, form=form, errors=form_errors(error))
            return _refused(shown, error)
        return _changed(team_id)


def _add_keys(router: APIRouter, views: _AccountViews) -> None:
    @router.get("/keys/{key_id}")
    async def show_key(request: Request, key_id: str) -> Response:
        return await views.show_key(request, key_id)

    @router.post("/keys/{key_id}")
    async def change_key(request: Request, key_id: str) -> Response:
        form, view, who = await read_form(request), view_of(request), person_of(request)
        before = key_fields(await views.admin.changeable_key(key_id, who), view)
        if who.team_ids is not None:  # the form has not all fields
            form = before | form
        try:
            await views.admin.update_key(key_id, parse_form(KeyChanges, form, view, before), who, form.get("version"))
        except (PrincipalError, Refused) as error:
            shown = await views.show_key(request, key_id, form=form, errors=form_errors(error))
            return _refused(shown, error)
        return _changed(key_id)

    @router.post("/keys/{key_id}/rotate")
    async def rotate_key(request: Request, key_id: str) -> Response:
        grace_s = (await read_form(request)).get("grace_s") or DEFAULT_GRACE_S
        body = parse_body(Rotation, f'{{"grace_s": {grace_s}}}'.encode())
        key, token = await views.admin.rotate_key(key_id, body.grace_s, person_of(request))
        return await views.show_list(request, token=token, token_of=key.name)

    @router.post("/keys/{key_id}/revoke")
    async def revoke_key(request: Request, key_id: str) -> Response:
        stops_running = (await read_form(request)).get("stop_running") == "on"
        await views.admin.revoke_key(key_id, person_of(request), stops_running=stops_running)
        return _changed(key_id)


def _refused(shown: Response, error: PrincipalError | Refused) -> Response:
    """Return a form that was not saved; with 409 where it would have overwritten another change."""
    if isinstance(error, ChangedMeanwhile):
        shown.status_code = 409
    return shown


def _changed(account_id: str) -> Response:
    """Redirect to the list, which shows the change; reloading it does not repeat the change."""
    return RedirectResponse(f"{LIST}?{urlencode({'changed': account_id})}", 303)
