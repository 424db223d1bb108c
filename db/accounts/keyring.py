"""All active API keys in memory, so that authentication does not wait for SQL."""

import asyncio
import contextlib
import logging
from collections.abc import Callable, Iterable, Mapping
from typing import Final

from nats.aio.msg import Msg
from pydantic import SecretStr

from db.accounts.keys import load_principals, load_stopped
from db.accounts.principal import Principal
from db.accounts.token import MAX_TOKEN_CHARS, hash_token
from db.engine import SQL_ERRORS, create_engine, describe, wait_for_database
from protocol import subjects
from protocol.errors import BusError
from protocol.nats.bus import Bus
from protocol.nats.clock import unix_now_ms

RELOAD_PERIOD_S: Final = 30.0  # in case messages are lost
RETRY_PERIOD_S: Final = 2.0  # while SQL is unavailable
RELOAD_GAP_S: Final = 0.2  # minimum between two loads
MAX_ASKERS: Final = 256  # commands that wait for the next load
# Answers go only to inboxes: sent to a subject of JetStream's API, an answer would be a command.
INBOXES: Final = "_INBOX."

OnRevoked = Callable[[frozenset[str], frozenset[str]], None]  # revoked keys, and keys whose running requests end

log = logging.getLogger(__name__)


class KeyRing:
    """Authenticates keys. ``start`` it, run ``run`` as a supervised task, ``close`` it."""

    def __init__(self, database_url: str, pepper: SecretStr, bus: Bus) -> None:
        self._engine = create_engine(database_url)
        self._pepper = pepper
        self._bus = bus
        self.on_revoked: OnRevoked | None = None
        self._principals: dict[str, Principal] = {}
        self._by_key: dict[str, Principal] = {}  # by key id
        self._revoked: frozenset[str] = frozenset()  # ids of keys that were active while this process ran
        self._stopped: frozenset[str] = frozenset()
        self._changed = asyncio.Event()
        self._askers: list[str] = []  # reply subjects of commands that wait until a change has taken effect
        self._changes_announced = 0
        self._changes_loaded = 0
        self._failing = False

    @property
    def may_be_old(self) -> bool:
        """True if a created or changed key may not be loaded yet."""
        return self._failing or self._changes_loaded < self._changes_announced

    def authenticate(self, token: str) -> Principal | None:
        """Return the principal of a key; None: unknown, revoked or expired. From memory, about 2 µs.

        The lookup's duration may depend on the token's HMAC. Without the pepper, an attacker cannot choose tokens whose
        HMACs share a prefix with a stored one. So timing reveals nothing, and no constant-time comparison is needed.
        """
        if len(token) > MAX_TOKEN_CHARS or not token.isascii():
            return None
        principal = self._principals.get(hash_token(token, self._pepper))
        if principal is None or principal.has_expired(unix_now_ms()):
            return None
        return principal

    def holder_of(self, key_id: str) -> Principal | None:
        """Return the current principal of a key id; None: no longer accepted. From memory."""
        return self._by_key.get(key_id)

    def is_revoked(self, key_id: str) -> bool:
        """Return whether a key that was accepted here has been revoked."""
        return key_id in self._revoked

    async def start(self) -> None:
        """Load the keys, waiting for SQL if it is unavailable. Raises SchemaMismatch and BusError."""
        await self._bus.subscribe(subjects.KEYS_CHANGED_SUBJECT, self._on_changed)
        self._bus.on_reconnect(self._on_reconnected)
        await wait_for_database(self._engine, self._load)

    async def run(self) -> None:
        """Reload the keys after each change, and every ``RELOAD_PERIOD_S``; never returns.

        While SQL is unavailable, the last known keys stay valid.
        """
        while True:
            await self._wait_for_change()
            self._changed.clear()
            askers, self._askers = self._askers, []
            try:
                await self._load()
            except SQL_ERRORS as error:
                self._note_failure(error)
                self._askers = [*askers, *self._askers][:MAX_ASKERS]
            else:
                self._note_success()
                await self._answer(askers)
            await asyncio.sleep(RELOAD_GAP_S)

    async def close(self) -> None:
        """Close the connections to SQL."""
        await self._engine.dispose()

    async def _wait_for_change(self) -> None:
        try:
            async with asyncio.timeout(RETRY_PERIOD_S if self._failing else RELOAD_PERIOD_S):
                await self._changed.wait()
        except TimeoutError:
            return

    async def _load(self) -> None:
        changes_announced = self._changes_announced
        async with self._engine.connect() as connection:
            principals, stopped = await load_principals(connection), await load_stopped(connection)
        gone = _key_ids(self._principals) - _key_ids(principals)
        newly_stopped = stopped - self._stopped
        self._principals, self._stopped = principals, stopped
        self._by_key = {principal.key_id: principal for principal in principals.values()}
        self._revoked |= gone
        self._changes_loaded = changes_announced
        if (gone or newly_stopped) and self.on_revoked is not None:
            self.on_revoked(gone, newly_stopped)

    async def _answer(self, askers: Iterable[str]) -> None:
        for reply in askers:
            with contextlib.suppress(BusError):  # the command has a time limit
                await self._bus.publish(reply, b"loaded")

    async def _on_changed(self, message: Msg) -> None:
        self._changes_announced += 1
        if message.reply.startswith(INBOXES) and len(self._askers) < MAX_ASKERS:
            self._askers.append(message.reply)
        self._changed.set()

    async def _on_reconnected(self) -> None:
        self._changes_announced += 1  # a message may have been missed
        self._changed.set()

    def _note_failure(self, error: Exception) -> None:
        if not self._failing:
            log.error("cannot load API keys, keeping the %d known keys: %s", len(self._principals), describe(error))
        self._failing = True

    def _note_success(self) -> None:
        if self._failing:
            log.warning("API keys reloaded: %d", len(self._principals))
        self._failing = False


def _key_ids(principals: Mapping[str, Principal]) -> frozenset[str]:
    return frozenset(principal.key_id for principal in principals.values())
