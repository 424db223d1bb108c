"""Principals out of SQL: the active keys with their teams."""

from collections.abc import Iterator
from dataclasses import replace

import msgspec
from sqlalchemy import RowMapping, select
from sqlalchemy.ext.asyncio import AsyncConnection

from db.accounts.principal import Principal, policy_of
from db.models import ApiKeyRow, TeamRow


async def load_principals(connection: AsyncConnection) -> dict[str, Principal]:
    """Return whose each token is, by its HMAC; of a rotated key the token before as well. Raises SQL's own errors."""
    active = select(ApiKeyRow.__table__).where(ApiKeyRow.revoked_unix_ms.is_(None))
    keys = (await connection.execute(active)).mappings().all()
    # After the keys: on PostgreSQL each statement sees what was committed before it, and a key's team is older.
    teams = {row["id"]: row for row in (await connection.execute(select(TeamRow.__table__))).mappings()}
    return {token_hmac: principal for key in keys for token_hmac, principal in _tokens_of(key, teams[key["team_id"]])}


async def load_stopped(connection: AsyncConnection) -> frozenset[str]:
    """Return the ids of the revoked keys whose running requests end, too. Raises SQL's own errors."""
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
