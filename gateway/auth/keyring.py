"""All active API keys in memory: no request waits for SQL to know whose it is."""

import asyncio
import logging
from typing import Final

from nats.aio.msg import Msg
from pydantic import SecretStr

from gateway.auth.principal import Principal
from gateway.auth.principals import load_principals
from gateway.auth.token import MAX_TOKEN_CHARS, hash_token
from gateway.db.engine import create_engine
from gateway.db.errors import SQL_ERRORS, DatabaseUnavailable, describe
from gateway.db.schema import check_schema
from protocol import subjects
from protocol.bus import Bus
from protocol.clock import unix_now_ms

RELOAD_PERIOD_S: Final = 30.0  # the backstop for lost messages
RELOAD_GAP_S: Final = 0.2  # between two loads, however many messages come

log = logging.getLogger(__name__)


class KeyRing:
    """Tells whose a key is. ``start`` it, run ``run`` as a supervised task, ``close`` it."""

    def __init__(self, database_url: str, pepper: SecretStr, bus: Bus) -> None:
        self._engine = create_engine(database_url)
        self._pepper = pepper
        self._bus = bus
        self._principals: dict[str, Principal] = {}
        self._changed = asyncio.Event()
        self._failing = False

    def authenticate(self, token: str) -> Principal | None:
        """Whose key this is; None: nobody's, or a revoked or expired one. From memory, about 2 µs.

        How long the lookup takes may depend on the token's HMAC, but says nothing about it to somebody without the
        pepper: he cannot choose tokens whose HMACs share a beginning with a stored one. So no comparison needs to
        take constant time, and nothing need be cached.
        """
        if len(token) > MAX_TOKEN_CHARS or not token.isascii():
            return None
        principal = self._principals.get(hash_token(token, self._pepper))
        if principal is None or principal.has_expired(unix_now_ms()):
            return None
        return principal

    async def start(self) -> None:
        """Load the keys. Raises SchemaMismatch or DatabaseUnavailable, and BusError."""
        await check_schema(self._engine)
        await self._bus.subscribe(subjects.KEYS_CHANGED_SUBJECT, self._on_changed)
        self._bus.on_reconnect(self._on_reconnected)
        try:
            await self._load()
        except SQL_ERRORS as error:
            raise DatabaseUnavailable(f"cannot load the API keys: {describe(error)}") from error

    async def run(self) -> None:
        """Load again when told that keys have changed, and every ``RELOAD_PERIOD_S``; never returns.

        While SQL is away the last known keys stay valid.
        """
        while True:
            await self._wait_for_change()
            self._changed.clear()
            try:
                await self._load()
            except SQL_ERRORS as error:
                self._note_failure(error)
            else:
                self._note_success()
            await asyncio.sleep(RELOAD_GAP_S)

    async def close(self) -> None:
        """Close the connections to SQL."""
        await self._engine.dispose()

    async def _wait_for_change(self) -> None:
        try:
            async with asyncio.timeout(RELOAD_PERIOD_S):
                await self._changed.wait()
        except TimeoutError:
            return

    async def _load(self) -> None:
        async with self._engine.connect() as connection:
            self._principals = await load_principals(connection)

    async def _on_changed(self, _message: Msg) -> None:
        self._changed.set()

    async def _on_reconnected(self) -> None:
        self._changed.set()  # a message may have been missed

    def _note_failure(self, error: Exception) -> None:
        if not self._failing:
            log.error("cannot load the API keys, keeping the %d known: %s", len(self._principals), describe(error))
        self._failing = True

    def _note_success(self) -> None:
        if self._failing:
            log.warning("API keys loaded again: %d", len(self._principals))
        self._failing = False
