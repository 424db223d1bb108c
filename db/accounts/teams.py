"""Organizations and teams. After changing a team, the caller publishes ``subjects.KEYS_CHANGED_SUBJECT``."""

import unicodedata
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any, Final

from sqlalchemy import FromClause, RowMapping, Select, insert, select, update
from sqlalchemy.exc import IntegrityError
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from db.accounts.audit import Change, check_version, difference, record, version_of
from db.accounts.checks import check_policy
from db.accounts.errors import InvalidField, InvalidName, NameTaken, UnknownOrganisation, UnknownTeam
from db.accounts.principal import NO_POLICY, POLICY_FIELDS, Policy, policy_of
from db.accounts.token import new_id
from db.engine import changing
from db.tables import OrganisationRow, TeamRow
from protocol.nats.clock import unix_now_ms

MAX_NAME_CHARS: Final = 100
ID_PREFIXES: Final = ("key_", "team_", "org_")


def normalized(name: str) -> str:
    """Return a name without surrounding space, in Unicode form NFC, so that names that look the same are equal."""
    return unicodedata.normalize("NFC", name).strip()


def checked_name(name: str) -> str:
    """Return the normalized name. Raises InvalidName."""
    name = normalized(name)
    if not name or len(name) > MAX_NAME_CHARS or not name.isprintable():
        raise InvalidName("name", f"must have 1 to {MAX_NAME_CHARS} printable characters")
    if name.casefold().startswith(ID_PREFIXES):
        raise InvalidName("name", f"must not start with the prefix of an id: {', '.join(ID_PREFIXES)}")
    if "/" in name or name in {".", ".."}:
        raise InvalidName("name", "must not contain a slash or be . or .. (names are used in URLs)")
    return name


def is_id(reference: str) -> bool:
    """Return whether a reference is an id or the prefix of an id, not a name."""
    return reference.startswith(ID_PREFIXES)


def means(reference: str, object_id: str, name: str) -> bool:
    """Return whether a reference matches the object with this id and name."""
    return object_id == reference if is_id(reference) else normalized(name) == normalized(reference)


def not_found(kind: str, reference: str, ids_by_name: Iterable[tuple[str, str]] = ()) -> str:
    """Return the message for a reference that matches nothing; ``ids_by_name``: pairs of name and id."""
    for name, object_id in ids_by_name:
        if name == reference:
            return f"no {kind} has the id {reference!r}. The {kind} with this name has the id {object_id}"
    return f"no {kind} has the id or name {reference!r}"


def must_be_free(name: str, names: Iterable[str], message: str) -> None:
    """Raise NameTaken if one of ``names`` looks the same. The unique index misses unnormalized names of old rows."""
    if any(normalized(other) == name for other in names):
        raise NameTaken(message)


# --- teams ------------------------------------------------------------------------------------------------------------

DEFAULT_ORGANISATION_ID: Final = "org_default"  # created by the migration

_ORGANISATIONS: Final = OrganisationRow.__table__
_TEAMS: Final = TeamRow.__table__


@dataclass(frozen=True, slots=True)
class Organisation:
    """An owner of teams."""

    organisation_id: str
    name: str
    created_unix_ms: int


@dataclass(frozen=True, slots=True)
class Team:
    """A team: keys that share limits and are one tenant."""

    team_id: str
    name: str
    organisation_id: str
    organisation_name: str
    created_unix_ms: int
    policy: Policy = NO_POLICY

    @property
    def version(self) -> str:
        """A hash of the team's state."""
        return version_of(_settings(self))


async def create_organisation(engine: AsyncEngine, name: str, actor: str) -> Organisation:
    """Create an organization. Raises InvalidField, NameTaken, and SQL errors."""
    name = checked_name(name)
    made = Organisation(new_id("org_"), name, unix_now_ms())
    async with writing(engine, _organisation_is_named(name)) as connection:
        await _must_be_free(connection, _ORGANISATIONS, name, _organisation_is_named(name))
        row = {"id": made.organisation_id, "name": name, "created_unix_ms": made.created_unix_ms}
        await connection.execute(insert(OrganisationRow).values(row))
        await record(connection, Change(actor, "organisation.create", made.organisation_id, None, {"name": name}))
    return made


async def rename_organisation(engine: AsyncEngine, reference: str, name: str, actor: str) -> Organisation:
    """Rename an organization, referenced by id or name.

    Raises InvalidField, NameTaken, UnknownOrganisation, and SQL errors.
    """
    async with writing(engine, _organisation_is_named(name)) as connection:
        found = await find_organisation(connection, reference)
        if name != found.name:
            name = checked_name(name)
            await _must_be_free(connection, _ORGANISATIONS, name, _organisation_is_named(name), found.organisation_id)
        changed = difference({"name": found.name}, {"name": name})
        if changed is None:
            return found
        await connection.execute(
            update(OrganisationRow).where(OrganisationRow.id == found.organisation_id).values(name=name)
        )
        await record(connection, Change(actor, "organisation.update", found.organisation_id, *changed))
    return replace(found, name=name)


async def list_organisations(engine: AsyncEngine) -> Sequence[Organisation]:
    """Return all organizations, oldest first. Raises SQL errors."""
    oldest_first = select(_ORGANISATIONS).order_by(_ORGANISATIONS.c.created_unix_ms, _ORGANISATIONS.c.id)
    async with engine.connect() as connection:
        return [_organisation(row) for row in (await connection.execute(oldest_first)).mappings()]


async def find_organisation(connection: AsyncConnection, reference: str) -> Organisation:
    """Return the organization with this id or name. Raises UnknownOrganisation, and SQL errors."""
    names = await _names(connection, _ORGANISATIONS)
    found = next((row_id for row_id, name in names.items() if means(reference, row_id, name)), None)
    if found is None:
        raise UnknownOrganisation(not_found("organization", reference, _by_name(names)))
    row = await connection.execute(select(_ORGANISATIONS).where(_ORGANISATIONS.c.id == found))
    return _organisation(row.mappings().one())


async def create_team(
    engine: AsyncEngine,
    name: str,
    actor: str,
    organisation: str = DEFAULT_ORGANISATION_ID,
    policy: Policy = NO_POLICY,
) -> Team:
    """Create a team in an organization, referenced by id or name.

    Raises InvalidField, NameTaken, and SQL errors.
    """
    name = checked_name(name)
    check_policy(policy)
    async with writing(engine, _team_is_named(name)) as connection:
        await _must_be_free(connection, _TEAMS, name, _team_is_named(name))
        owner = await _owner(connection, organisation)
        team = Team(new_id("team_"), name, owner.organisation_id, owner.name, unix_now_ms(), policy)
        row = {
            "id": team.team_id,
            "organisation_id": owner.organisation_id,
            "name": name,
            "created_unix_ms": team.created_unix_ms,
            **asdict(policy),
        }
        await connection.execute(insert(TeamRow).values(row))
        fields = {field: value for field, value in _settings(team).items() if value is not None}
        await record(connection, Change(actor, "team.create", team.team_id, None, fields))
    return team


async def update_team(
    engine: AsyncEngine, reference: str, changes: Mapping[str, Any], actor: str, *, version: str | None = None
) -> Team:
    """Change a team, referenced by id or name: ``name``, ``organisation``, and fields of Policy (None: no limit).

    ``version``: the version that the object must still have.


    Raises ChangedMeanwhile, InvalidField, NameTaken, UnknownTeam, and SQL errors.
    """
    async with writing(engine, _team_is_named(changes.get("name", ""))) as connection:
        before = await find_team(connection, reference, for_update=True)
        check_version(_settings(before), version)
        policy = changed_policy(before.policy, changes)
        name = changes.get("name", before.name)
        if name != before.name:  # an older release may have accepted a name that is invalid now
            name = checked_name(name)
            await _must_be_free(connection, _TEAMS, name, _team_is_named(name), before.team_id)
        after = replace(before, name=name, policy=policy)
        if "organisation" in changes:
            owner = await _owner(connection, changes["organisation"])
            after = replace(after, organisation_id=owner.organisation_id, organisation_name=owner.name)
        changed = difference(_settings(before), _settings(after))
        if changed is not None:
            await connection.execute(update(TeamRow).where(TeamRow.id == after.team_id).values(changed[1]))
            await record(connection, Change(actor, "team.update", after.team_id, *changed))
    return after


async def list_teams(engine: AsyncEngine) -> Sequence[Team]:
    """Return all teams, oldest first. Raises SQL errors."""
    async with engine.connect() as connection:
        rows = await connection.execute(_select_teams().order_by(_TEAMS.c.created_unix_ms, _TEAMS.c.id))
        return [_team(row) for row in rows.mappings()]


async def find_team(connection: AsyncConnection, reference: str, *, for_update: bool = False) -> Team:
    """Return the team with this id or name. Raises UnknownTeam, and SQL errors."""
    names = await _names(connection, _TEAMS)
    found = next((row_id for row_id, name in names.items() if means(reference, row_id, name)), None)
    if found is None:
        raise UnknownTeam(not_found("team", reference, _by_name(names)))
    wanted = _select_teams().where(_TEAMS.c.id == found)
    if for_update:
        wanted = wanted.with_for_update(of=_TEAMS)
    return _team((await connection.execute(wanted)).mappings().one())


def changed_policy(policy: Policy, changes: Mapping[str, Any]) -> Policy:
    """Return a policy after changes. Raises InvalidField."""
    after = replace(policy, **{field: changes[field] for field in POLICY_FIELDS if field in changes})
    check_policy(after)
    return after


@asynccontextmanager
async def writing(engine: AsyncEngine, name_is_taken: str = "") -> AsyncIterator[AsyncConnection]:
    """Begin a transaction like ``changing``. Raises NameTaken if a name is not unique."""
    try:
        async with changing(engine) as connection:
            yield connection
    except IntegrityError as error:
        raise NameTaken(name_is_taken) from error


async def _names(connection: AsyncConnection, table: FromClause) -> dict[str, str]:
    """Return the names by id, oldest first. SQL cannot compare them: old rows have unnormalized names."""
    rows = await connection.execute(select(table.c.id, table.c.name).order_by(table.c.created_unix_ms, table.c.id))
    return {row.id: row.name for row in rows}


def _by_name(names: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    return ((name, row_id) for row_id, name in names.items())


async def _must_be_free(
    connection: AsyncConnection, table: FromClause, name: str, message: str, own_id: str | None = None
) -> None:
    names = await _names(connection, table)
    must_be_free(name, (other for row_id, other in names.items() if row_id != own_id), message)


def _team_is_named(name: str) -> str:
    return f"a team is already named {name!r}"


def _organisation_is_named(name: str) -> str:
    return f"an organization is already named {name!r}"


async def _owner(connection: AsyncConnection, reference: str) -> Organisation:
    try:
        return await find_organisation(connection, reference)
    except UnknownOrganisation as error:
        raise InvalidField("organisation", str(error)) from error


def _select_teams() -> Select[Any]:
    owner_name = _ORGANISATIONS.c.name.label("organisation_name")
    return select(_TEAMS, owner_name).join(_ORGANISATIONS, _ORGANISATIONS.c.id == _TEAMS.c.organisation_id)


def _organisation(row: RowMapping) -> Organisation:
    return Organisation(row["id"], row["name"], row["created_unix_ms"])


def _team(row: RowMapping) -> Team:
    return Team(
        team_id=row["id"],
        name=row["name"],
        organisation_id=row["organisation_id"],
        organisation_name=row["organisation_name"],
        created_unix_ms=row["created_unix_ms"],
        policy=policy_of(row),
    )


def _settings(team: Team) -> dict[str, Any]:
    """Columns of a team that can be changed."""
    return {"name": team.name, "organisation_id": team.organisation_id, **asdict(team.policy)}
