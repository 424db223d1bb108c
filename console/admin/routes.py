"""``/admin/v1``: for keys with the scope ``admin``, and for users who have logged in, within their role."""

import contextlib
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Final

from fastapi import APIRouter, Depends, FastAPI, Header, Query, Request, Response

from console.admin import schema
from console.admin.service import AdminService
from console.admin.views import audit_view, key_view, organisation_view, team_view
from console.admin.webhook_routes import webhooks_router
from console.rules import API, person_of
from db.accounts import errors, teams
from db.accounts.audit import AuditFilter, list_changes
from db.accounts.errors import InvalidField, NameTaken, NotAllowed, NotFound, PrincipalError
from db.accounts.keys import ApiKey
from db.accounts.teams import Team, means
from gateway.errors import (
    ChangedMeanwhile,
    InvalidParameter,
    NameInUse,
    PreconditionFailed,
    Refused,
    RoleNotAllowed,
    UnknownObject,
)
from gateway.http.pages import body_schema, json_answer, refuse

ANY_VERSION: Final = "*"  # of If-Match
NOTHING_MORE: Final[Mapping[str, Any]] = {}

_IfMatch = Annotated[
    str | None, Header(description="The `ETag` that the object must still have. If it has another: 412.")
]


def admin_router(admin: AdminService) -> APIRouter:
    """Build the router of the admin API."""
    router = APIRouter(prefix=API, dependencies=[Depends(admin.admit)])
    for part in (_organisations(admin), _teams(admin), _keys(admin), _audit(admin), webhooks_router(admin)):
        router.include_router(part)
    return router


def _organisations(admin: AdminService) -> APIRouter:
    router = APIRouter(prefix="/organisations", tags=["organisations"])
    database = admin.database

    @router.get("")
    async def list_organisations() -> Response:
        """List all organizations, oldest first."""
        return _list([organisation_view(found) for found in await teams.list_organisations(database)])

    @router.post("", status_code=201, openapi_extra=body_schema("OrganisationBody"))
    async def create_organisation(request: Request) -> Response:
        """Create an organization."""
        who = person_of(request)
        body = await admin.body(request, schema.OrganisationBody)
        return json_answer(organisation_view(await teams.create_organisation(database, body.name, who.actor)), 201)

    @router.get("/{reference}")
    async def retrieve_organisation(reference: str) -> Response:
        """Retrieve an organization by its id or name."""
        async with database.connect() as connection:
            return json_answer(organisation_view(await teams.find_organisation(connection, reference)))

    @router.patch("/{reference}", openapi_extra=body_schema("OrganisationBody"))
    async def update_organisation(request: Request, reference: str) -> Response:
        """Rename an organization."""
        who = person_of(request)
        body = await admin.body(request, schema.OrganisationBody)
        renamed = await teams.rename_organisation(database, reference, body.name, who.actor)
        return json_answer(organisation_view(renamed))

    return router


def _teams(admin: AdminService) -> APIRouter:
    router = APIRouter(prefix="/teams", tags=["teams"])

    @router.get("")
    async def list_teams(request: Request) -> Response:
        """List all teams, oldest first."""
        return _list([team_view(team) for team in await admin.list_teams(person_of(request))])

    @router.post("", status_code=201, openapi_extra=body_schema("NewTeam"))
    async def create_team(request: Request) -> Response:
        """Create a team."""
        who = person_of(request)
        body = await admin.body(request, schema.NewTeam)
        return await _warned(admin, await admin.create_team(body, who), 201)

    @router.get("/{reference}")
    async def retrieve_team(request: Request, reference: str) -> Response:
        """Retrieve a team by its id or name."""
        return _account_answer(await admin.find_team(reference, person_of(request)))

    @router.patch("/{reference}", openapi_extra=body_schema("TeamChanges"))
    async def update_team(request: Request, reference: str, if_match: _IfMatch = None) -> Response:
        """Change the given fields; null removes a limit. The change applies to all keys of the team immediately."""
        who = person_of(request)
        body = await admin.body(request, schema.TeamChanges)
        version = None if if_match is None else _matched(await admin.find_team(reference, who), if_match)
        with _if_unchanged(if_match):
            team = await admin.update_team(reference, body, who, version)
        return await _warned(admin, team)

    return router


def _keys(admin: AdminService) -> APIRouter:
    router = APIRouter(prefix="/keys", tags=["keys"])

    @router.get("")
    async def list_keys(request: Request, team: str | None = None, include_revoked: bool = False) -> Response:
        """List the keys, oldest first; only those of `team`, an id or name, if it is given."""
        found = await admin.list_keys(person_of(request), include_revoked=include_revoked)
        return _list([key_view(key) for key in found if team is None or means(team, key.team_id, key.team_name)])

    @router.post("", status_code=201, openapi_extra=body_schema("NewKey"))
    async def create_key(request: Request) -> Response:
        """Create a key. Its `token` is returned only in this response."""
        who = person_of(request)
        body = await admin.body(request, schema.NewKey)
        key, token = await admin.create_key(body, who)
        return await _warned(admin, key, 201, token)

    @router.get("/{reference}")
    async def retrieve_key(request: Request, reference: str) -> Response:
        """Retrieve a key by its id, a unique prefix of it, or its name; a revoked key by its id."""
        return _account_answer(await admin.find_key(reference, person_of(request)))

    @router.patch("/{reference}", openapi_extra=body_schema("KeyChanges"))
    async def update_key(request: Request, reference: str, if_match: _IfMatch = None) -> Response:
        """Change the given fields; null removes a limit."""
        who = person_of(request)
        body = await admin.body(request, schema.KeyChanges)
        version = None if if_match is None else _matched(await admin.find_key(reference, who), if_match)
        with _if_unchanged(if_match):
            key = await admin.update_key(reference, body, who, version)
        return await _warned(admin, key)

    @router.post("/{reference}/rotate", openapi_extra=body_schema("Rotation"))
    async def rotate_key(request: Request, reference: str) -> Response:
        """Give the key a new `token`; the previous one stays valid for `grace_s` seconds."""
        who = person_of(request)
        body = await admin.body(request, schema.Rotation)
        key, token = await admin.rotate_key(reference, body.grace_s, who)
        return json_answer(key_view(key, token))

    @router.delete("/{reference}")
    async def revoke_key(request: Request, reference: str, stop_running: bool = False) -> Response:
        """Revoke the key: it is refused from now on, and its waiting requests end. Its past usage stays.

        With `stop_running`, its running requests end, too.
        """
        who = person_of(request)
        return json_answer(key_view(await admin.revoke_key(reference, who, stops_running=stop_running)))

    return router


async def _warned(admin: AdminService, account: Team | ApiKey, status: int = 200, token: str | None = None) -> Response:
    """Answer a creation or a change, with ``warnings`` where there are any."""
    warnings = await admin.warnings(account)
    return _account_answer(account, status, token, {"warnings": warnings} if warnings else {})


def _account_answer(
    account: Team | ApiKey, status: int = 200, token: str | None = None, more: Mapping[str, Any] = NOTHING_MORE
) -> Response:
    """Answer a team or a key, with its version as ``ETag``."""
    view = key_view(account, token) if isinstance(account, ApiKey) else team_view(account)
    answer = json_answer({**view, **more}, status)
    answer.headers["etag"] = _etag(account.version)
    return answer


def _etag(version: str) -> str:
    return f'"{version}"'


@contextlib.contextmanager
def _if_unchanged(if_match: str | None) -> Iterator[None]:
    """Answer 412 if an object with ``If-Match`` is changed between the look at its version and its own change."""
    try:
        yield
    except errors.ChangedMeanwhile as error:
        if if_match is None:
            raise
        raise PreconditionFailed from error


def _matched(account: Team | ApiKey, if_match: str) -> str | None:
    """Return the version that a change must find; None: any. Raises PreconditionFailed."""
    if if_match.strip() == ANY_VERSION:
        return None
    if _etag(account.version) not in {tag.strip() for tag in if_match.split(",")}:
        raise PreconditionFailed
    return account.version


def _audit(admin: AdminService) -> APIRouter:
    router = APIRouter(prefix="/audit", tags=["audit"])

    @router.get("")
    async def list_audit(request: Request, query: Annotated[schema.AuditQuery, Query()]) -> Response:
        """List changes with their actors, newest first; `after` is the last id of the previous page."""
        audit_filter = AuditFilter(
            query.subject,
            query.actor,
            query.since_unix_ms,
            query.until_unix_ms,
            query.after,
            await admin.audited_subjects(person_of(request)),
        )
        found = await list_changes(admin.database, audit_filter, query.limit + 1)
        return _list([audit_view(entry) for entry in found[: query.limit]], has_more=len(found) > query.limit)

    return router


def add_admin_answers(app: FastAPI) -> None:
    """Register the responses to errors of the account functions."""

    @app.exception_handler(PrincipalError)
    async def on_principal_error(request: Request, error: PrincipalError) -> Response:
        return refuse(request, principal_answer(error))


def principal_answer(error: PrincipalError) -> Refused:
    """Return the API's error for an error of the account functions."""
    if isinstance(error, InvalidField):
        return InvalidParameter(str(error), param=error.field)
    if isinstance(error, NameTaken):
        return NameInUse(str(error), param="name")
    if isinstance(error, errors.ChangedMeanwhile):
        return ChangedMeanwhile(str(error))
    if isinstance(error, NotAllowed):
        return RoleNotAllowed(str(error))
    return UnknownObject(str(error)) if isinstance(error, NotFound) else InvalidParameter(str(error))


def _list(data: list[dict[str, Any]], *, has_more: bool = False) -> Response:
    return json_answer({"object": "list", "data": data, "has_more": has_more})
