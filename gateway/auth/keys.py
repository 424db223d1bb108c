"""Create, list and revoke API keys. Whoever changes keys then publishes ``subjects.KEYS_CHANGED_SUBJECT``."""

import json
import secrets
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Final

from pydantic import SecretStr
from sqlalchemy import insert, select, update
from sqlalchemy.exc import IntegrityError
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from gateway.auth.errors import AmbiguousKey, DuplicateKeyName, InvalidKeyName, UnknownKey
from gateway.auth.principal import DEFAULT_TEAM_ID, INFERENCE, NO_POLICY, Policy
from gateway.auth.token import BASE62, hash_token, new_token
from gateway.db.engine import IMMEDIATE, SQLITE_BEGIN
from gateway.db.models import ApiKeyRow

MAX_NAME_CHARS: Final = 100
ID_CHARS: Final = 16  # 95 random bits: collisions are not a case to handle
MIN_PREFIX_CHARS: Final = 6  # "key_" and two characters


@dataclass(frozen=True, slots=True)
class ApiKey:
    """What is known about a key; the key itself is not."""

    key_id: str
    name: str
    last_four: str
    created_unix_ms: int
    revoked_unix_ms: int | None  # None: active


@dataclass(frozen=True, slots=True)
class Grant:
    """What a new key may do; see gateway.db.models.ApiKeyRow."""

    team_id: str = DEFAULT_TEAM_ID
    scopes: tuple[str, ...] = (INFERENCE,)
    models: tuple[str, ...] | None = None
    expires_unix_ms: int | None = None
    policy: Policy = NO_POLICY


USUAL_GRANT: Final = Grant()


async def create_key(
    engine: AsyncEngine, name: str, pepper: SecretStr, grant: Grant = USUAL_GRANT
) -> tuple[ApiKey, str]:
    """Create a key; returns it and its plaintext, which is nowhere else and cannot be had again.

    Raises InvalidKeyName, DuplicateKeyName, and SQL's own errors.
    """
    if not name.strip() or len(name) > MAX_NAME_CHARS or not name.isprintable():
        raise InvalidKeyName(f"a key's name must have 1 to {MAX_NAME_CHARS} printable characters")
    token = new_token()
    key = ApiKey(
        key_id="key_" + "".join(secrets.choice(BASE62) for _ in range(ID_CHARS)),
        name=name,
        last_four=token[-4:],
        created_unix_ms=_now_unix_ms(),
        revoked_unix_ms=None,
    )
    row = {
        "id": key.key_id,
        "name": key.name,
        "token_hmac": hash_token(token, pepper),
        "last_four": key.last_four,
        "created_unix_ms": key.created_unix_ms,
        "team_id": grant.team_id,
        "scopes": " ".join(grant.scopes),
        "models": None if grant.models is None else json.dumps(grant.models),
        "expires_unix_ms": grant.expires_unix_ms,
        **asdict(grant.policy),
    }
    try:
        async with engine.begin() as connection:
            await connection.execute(insert(ApiKeyRow).values(row))
    except IntegrityError as error:
        raise DuplicateKeyName(f"an active key is named {name!r}; revoke it first or choose another name") from error
    return key, token


async def list_keys(engine: AsyncEngine, *, include_revoked: bool = False) -> Sequence[ApiKey]:
    """All keys, oldest first. Raises SQL's own errors."""
    async with engine.connect() as connection:
        keys = await _select_all(connection)
    return [key for key in keys if include_revoked or key.revoked_unix_ms is None]


async def revoke_key(engine: AsyncEngine, reference: str) -> ApiKey:
    """Revoke an active key, named by its id, its name, or a prefix of its id that no other active key has.

    Raises UnknownKey, AmbiguousKey, and SQL's own errors.
    """
    async with engine.execution_options(**{SQLITE_BEGIN: IMMEDIATE}).begin() as connection:
        key = await _find_active(connection, reference)
        revoked_unix_ms = _now_unix_ms()
        await connection.execute(
            update(ApiKeyRow)
            .where(ApiKeyRow.id == key.key_id, ApiKeyRow.revoked_unix_ms.is_(None))
            .values(revoked_unix_ms=revoked_unix_ms)
        )
    return ApiKey(key.key_id, key.name, key.last_four, key.created_unix_ms, revoked_unix_ms)


async def _select_all(connection: AsyncConnection) -> list[ApiKey]:
    statement = select(
        ApiKeyRow.id, ApiKeyRow.name, ApiKeyRow.last_four, ApiKeyRow.created_unix_ms, ApiKeyRow.revoked_unix_ms
    ).order_by(ApiKeyRow.created_unix_ms, ApiKeyRow.id)
    return [ApiKey(*row) for row in await connection.execute(statement)]


async def _find_active(connection: AsyncConnection, reference: str) -> ApiKey:
    # All of them are in every gateway's memory anyway, and LIKE ignores case on SQLite.
    active = [key for key in await _select_all(connection) if key.revoked_unix_ms is None]
    for key in active:
        if reference in {key.key_id, key.name}:
            return key
    begun = [key for key in active if len(reference) >= MIN_PREFIX_CHARS and key.key_id.startswith(reference)]
    if not begun:
        raise UnknownKey(f"no active key has the id or name {reference!r}")
    if len(begun) > 1:
        raise AmbiguousKey(f"{len(begun)} active keys have ids that begin with {reference!r}: give more of it")
    return begun[0]


def _now_unix_ms() -> int:
    return time.time_ns() // 1_000_000
