"""API keys: create, change, rotate, revoke. The caller then publishes ``subjects.KEYS_CHANGED_SUBJECT``."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Final

import msgspec
from pydantic import SecretStr
from sqlalchemy import RowMapping, Update, insert, select, update
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from db.accounts.audit import Change, check_version, difference, record, version_of
from db.accounts.checks import check_policy, check_scopes
from db.accounts.errors import AmbiguousKey, InvalidField, UnknownKey, UnknownTeam
from db.accounts.principal import DEFAULT_TEAM_ID, INFERENCE, NO_POLICY, Policy, Principal, policy_of
from db.accounts.teams import Team, changed_policy, checked_name, find_team, means, must_be_free, not_found, writing
from db.accounts.token import hash_token, new_id, new_token
from db.tables import ApiKeyRow, TeamRow
from protocol.nats.clock import unix_now_ms


async def load_principals(connection: AsyncConnection) -> dict[str, Principal]:
    """Return the principals by HMAC of their tokens, including previous tokens of rotated keys. Raises SQL errors."""
    active = select(ApiKeyRow.__table__).where(ApiKeyRow.revoked_unix_ms.is_(None))
    keys = (await connection.execute(active)).mappings().all()
    # Teams after keys: on PostgreSQL each statement sees earlier commits, and a key's team is older than the key.
    teams = {row["id"]: row for row in (await connection.execute(select(TeamRow.__table__))).mappings()}
    return {token_hmac: principal for key in keys for token_hmac, principal in _tokens_of(key, teams[key["team_id"]])}


async def load_stopped(connection: AsyncConnection) -> frozenset[str]:
    """Return the ids of revoked keys whose running requests also end. Raises SQL errors."""
    found = await connection.execute(select(ApiKeyRow.id).where(ApiKeyRow.stops_running.is_(True)))
    return frozenset(found.scalars())


def _tokens_of(key: RowMapping, team: RowMapping) -> Iterator[tuple[str, Principal]]:
    principal = Principal(
        key_id=key["id"],
        key_name=key["name"],
        team_id=team["id"],
        team_name=team["name"],
        organisation_id=team["organisation_id"],
        scopes=frozenset(key["scopes"].split()),
        models=None if key["models"] is None else frozenset(msgspec.json.decode(key["models"], type=list[str])),
        expires_unix_ms=key["expires_unix_ms"],
        key_policy=policy_of(key),
        team_policy=policy_of(team),
    )
    yield key["token_hmac"], principal
    if key["previous_hmac"] is not None:
        ends = [end for end in (key["expires_unix_ms"], key["previous_until_unix_ms"]) if end is not None]
        yield key["previous_hmac"], replace(principal, expires_unix_ms=min(ends))


# --- keys -------------------------------------------------------------------------------------------------------------

MIN_PREFIX_CHARS: Final = 6  # "key_" and two characters
DEFAULT_GRACE_S: Final = 86_400
MAX_GRACE_S: Final = 30 * 86_400
SYSTEM: Final = "system"  # actor of Spillway's own changes

_KEYS: Final = ApiKeyRow.__table__


@dataclass(frozen=True, slots=True)
class ApiKey:
    """A key's record, without the key itself."""

    key_id: str
    name: str
    last_four: str
    created_unix_ms: int
    revoked_unix_ms: int | None  # None: active
    team_id: str
    team_name: str
    scopes: tuple[str, ...]
    models: tuple[str, ...] | None  # None: all
    expires_unix_ms: int | None
    previous_until_unix_ms: int | None  # until when the previous token is accepted
    policy: Policy
    created_by: str | None = None  # an actor of the audit log; None: unknown

    @property
    def version(self) -> str:
        """A hash of the key's state."""
        return version_of(self.settings)

    @property
    def settings(self) -> dict[str, Any]:
        """The columns that can be changed."""
        return {
            "name": self.name,
            "team_id": self.team_id,
            "scopes": self.scopes,
            "models": self.models,
            "expires_unix_ms": self.expires_unix_ms,
            **asdict(self.policy),
        }


@dataclass(frozen=True, slots=True)
class Grant:
    """Rights of a new key; see db.tables.ApiKeyRow."""

    team_id: str = DEFAULT_TEAM_ID  # or its name
    scopes: tuple[str, ...] = (INFERENCE,)
    models: tuple[str, ...] | None = None
    expires_unix_ms: int | None = None
    policy: Policy = NO_POLICY


USUAL_GRANT: Final = Grant()


async def create_key(
    engine: AsyncEngine, name: str, pepper: SecretStr, grant: Grant = USUAL_GRANT, actor: str = SYSTEM
) -> tuple[ApiKey, str]:
    """Create a key; return it and its plaintext, which is not stored.

    Raises InvalidField, NameTaken, and SQL errors.
    """
    name = checked_name(name)
    check_policy(grant.policy)
    token = new_token()
    async with writing(engine, _taken(name)) as connection:
        _must_be_free(name, await _select_all(connection))
        team = await _team(connection, grant.team_id)
        key = ApiKey(
            key_id=new_id("key_"),
            name=name,
            last_four=token[-4:],
            created_unix_ms=unix_now_ms(),
            revoked_unix_ms=None,
            team_id=team.team_id,
            team_name=team.name,
            scopes=check_scopes(grant.scopes),
            models=grant.models,
            expires_unix_ms=grant.expires_unix_ms,
            previous_until_unix_ms=None,
            policy=grant.policy,
            created_by=actor,
        )
        row = {
            "id": key.key_id,
            "token_hmac": hash_token(token, pepper),
            "last_four": key.last_four,
            "created_unix_ms": key.created_unix_ms,
            "created_by": actor,
            **_columns(key.settings),
        }
        await connection.execute(insert(ApiKeyRow).values(row))
        fields = {field: value for field, value in key.settings.items() if value is not None}
        await record(connection, Change(actor, "key.create", key.key_id, None, fields))
    return key, token


async def update_key(
    engine: AsyncEngine, reference: str, changes: Mapping[str, Any], actor: str, *, version: str | None = None
) -> ApiKey:
    """Change an active key: ``name``, ``team``, ``scopes``, ``models``, ``expires_unix_ms``, and fields of Policy.

    ``version``: the version that the object must still have.

    Raises ChangedMeanwhile, InvalidField, NameTaken, UnknownKey, AmbiguousKey,
    and SQL errors.
    """
    async with writing(engine, _taken(changes.get("name"))) as connection:
        before = await _find_active(connection, reference)
        check_version(before.settings, version)
        name = changes.get("name", before.name)
        if name != before.name:  # an older release may have accepted a name that is invalid now
            name = checked_name(name)
            _must_be_free(name, [key for key in await _select_all(connection) if key.key_id != before.key_id])
        after = replace(
            before,
            name=name,
            scopes=check_scopes(changes.get("scopes", before.scopes)),
            models=changes.get("models", before.models),
            expires_unix_ms=changes.get("expires_unix_ms", before.expires_unix_ms),
            policy=changed_policy(before.policy, changes),
        )
        if "team" in changes:
            team = await _team(connection, changes["team"])
            after = replace(after, team_id=team.team_id, team_name=team.name)
        changed = difference(before.settings, after.settings)
        if changed is not None:
            await connection.execute(_of(before).values(_columns(changed[1])))
            await record(connection, Change(actor, "key.update", before.key_id, *changed))
    return after


async def rotate_key(
    engine: AsyncEngine, reference: str, pepper: SecretStr, actor: str, grace_s: int = DEFAULT_GRACE_S
) -> tuple[ApiKey, str]:
    """Give a key a new plaintext and return it. The previous one is accepted for another ``grace_s``.

    An even older one becomes invalid: a key has at most two.

    Raises InvalidField, UnknownKey, AmbiguousKey, and SQL errors.
    """
    if not 0 <= grace_s <= MAX_GRACE_S:
        raise InvalidField("grace_s", f"must be 0 to {MAX_GRACE_S}")
    token, now_unix_ms = new_token(), unix_now_ms()
    async with writing(engine) as connection:
        before = await _find_active(connection, reference)
        kept = await connection.scalar(select(ApiKeyRow.token_hmac).where(ApiKeyRow.id == before.key_id))
        until_unix_ms = now_unix_ms + 1000 * grace_s if grace_s else None
        after = replace(before, last_four=token[-4:], previous_until_unix_ms=until_unix_ms)
        row = {
            "token_hmac": hash_token(token, pepper),
            "last_four": after.last_four,
            "previous_hmac": kept if grace_s else None,
            "previous_until_unix_ms": until_unix_ms,
        }
        await connection.execute(_of(before).values(row))
        rotated = ({"last_four": before.last_four}, {"last_four": after.last_four, "grace_s": grace_s})
        await record(connection, Change(actor, "key.rotate", before.key_id, *rotated))
    return after, token


async def revoke_key(
    engine: AsyncEngine, reference: str, actor: str = SYSTEM, *, stops_running: bool = False
) -> ApiKey:
    """Revoke an active key, named by its id, its name, or a prefix of its id that no other active key has.

    Its waiting requests end; its running ones if ``stops_running``.

    Raises UnknownKey, AmbiguousKey, and SQL errors.
    """
    async with writing(engine) as connection:
        before = await _find_active(connection, reference)
        after = replace(before, revoked_unix_ms=unix_now_ms())
        values = {"revoked_unix_ms": after.revoked_unix_ms, "stops_running": stops_running}
        await connection.execute(_of(before).values(values))
        changes = ({"revoked_unix_ms": None}, {name: value for name, value in values.items() if value})
        await record(connection, Change(actor, "key.revoke", before.key_id, *changes))
    return after


async def list_keys(engine: AsyncEngine, *, include_revoked: bool = False) -> Sequence[ApiKey]:
    """Return all keys, oldest first. Raises SQL errors."""
    async with engine.connect() as connection:
        keys = await _select_all(connection)
    return [key for key in keys if include_revoked or key.revoked_unix_ms is None]


async def find_key(engine: AsyncEngine, reference: str) -> ApiKey:
    """Return the active key with this id, name or id prefix, or the revoked key with this id.

    Raises UnknownKey, AmbiguousKey, and SQL errors.
    """
    async with engine.connect() as connection:
        keys = await _select_all(connection)
    exact = next((key for key in keys if key.key_id == reference), None)
    return exact or _pick_active(keys, reference)


async def _select_all(connection: AsyncConnection) -> list[ApiKey]:
    # All keys are few enough for every gateway's memory, and LIKE ignores case on SQLite.
    joined = select(_KEYS, TeamRow.name.label("team_name")).join(TeamRow, TeamRow.id == _KEYS.c.team_id)
    rows = await connection.execute(joined.order_by(_KEYS.c.created_unix_ms, _KEYS.c.id))
    return [_key(row) for row in rows.mappings()]


async def _find_active(connection: AsyncConnection, reference: str) -> ApiKey:
    """Return the referenced key, locked against concurrent changes."""
    key_id = _pick_active(await _select_all(connection), reference).key_id
    await connection.execute(select(ApiKeyRow.id).where(ApiKeyRow.id == key_id).with_for_update())
    return _pick_active(await _select_all(connection), key_id)


def _pick_active(keys: Sequence[ApiKey], reference: str) -> ApiKey:
    active = [key for key in keys if key.revoked_unix_ms is None]
    for key in active:
        if means(reference, key.key_id, key.name):
            return key
    if any(key.key_id == reference for key in keys):
        raise UnknownKey(f"the key {reference} is revoked")
    begun = [key for key in active if len(reference) >= MIN_PREFIX_CHARS and key.key_id.startswith(reference)]
    if not begun or any(key.name == reference for key in active):  # a name from an older release is not a prefix
        raise UnknownKey(not_found("active key", reference, ((key.name, key.key_id) for key in active)))
    if len(begun) > 1:
        raise AmbiguousKey(f"{len(begun)} active keys have ids that start with {reference!r}. Use a longer prefix")
    return begun[0]


async def _team(connection: AsyncConnection, reference: str) -> Team:
    try:
        return await find_team(connection, reference)
    except UnknownTeam as error:
        raise InvalidField("team", str(error)) from error


def _of(key: ApiKey) -> Update:
    return update(ApiKeyRow).where(ApiKeyRow.id == key.key_id)


def _must_be_free(name: str, keys: Sequence[ApiKey]) -> None:
    must_be_free(name, (key.name for key in keys if key.revoked_unix_ms is None), _taken(name))


def _taken(name: str | None) -> str:
    return f"an active key is already named {name!r}. Revoke it or choose another name"


def _columns(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings as column values."""
    columns = dict(settings)
    if "scopes" in columns:
        columns["scopes"] = " ".join(columns["scopes"])
    if columns.get("models") is not None:
        columns["models"] = json.dumps(columns["models"])
    return columns


def _key(row: RowMapping) -> ApiKey:
    return ApiKey(
        key_id=row["id"],
        name=row["name"],
        last_four=row["last_four"],
        created_unix_ms=row["created_unix_ms"],
        revoked_unix_ms=row["revoked_unix_ms"],
        team_id=row["team_id"],
        team_name=row["team_name"],
        scopes=tuple(row["scopes"].split()),
        models=None if row["models"] is None else tuple(json.loads(row["models"])),
        expires_unix_ms=row["expires_unix_ms"],
        previous_until_unix_ms=row["previous_until_unix_ms"],
        policy=policy_of(row),
        created_by=row["created_by"],
    )
