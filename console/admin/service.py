"""The operations behind the admin API: authenticate, read the body, apply a change, notify the gateways.

The dashboard's forms use the same operations.
"""

import logging
from typing import TypeVar

from fastapi import Request
from sqlalchemy.ext.asyncio import AsyncEngine

from console.admin.schema import AdminBody, KeyChanges, NewKey, NewTeam, TeamChanges
from console.login.login import Login
from db.accounts import keys, teams
from db.accounts.budgets import budget_warnings, unpriced_models
from db.accounts.checks import checked_grant
from db.accounts.keys import ApiKey, Grant
from db.accounts.principal import ADMIN, policy_of
from db.accounts.teams import Team
from db.money import CLIENTS
from db.prices import load_prices
from gateway.api.fields import parse_body
from gateway.http.body import read_body
from gateway.http.pages import exchange_of
from gateway.mount import GatewayParts
from gateway.tokenizing.settings import canonical_names
from ledger.webhooks.endpoints import Endpoints
from protocol import subjects
from protocol.errors import BusError
from protocol.nats.clock import unix_now_ms

log = logging.getLogger(__name__)

_Body = TypeVar("_Body", bound=AdminBody)


class AdminService:
    """Applies changes to teams and keys for the admin API and the dashboard."""

    def __init__(self, gateway: GatewayParts, login: Login, webhooks: Endpoints) -> None:
        self.settings = gateway.settings
        self.database: AsyncEngine = gateway.database
        self.webhooks = webhooks
        self._gateway = gateway
        self._login = login
        self._models = canonical_names(self.settings.models)

    async def actor(self, request: Request) -> str:
        """Return the client's name in the audit log: by their key if they send one, else by their session.

        Raises InvalidApiKey, MissingScope, LoginRequired, CrossOriginRequest, and SQL's own errors.
        """
        exchange = exchange_of(request)
        if b"authorization" in exchange.headers:
            return f"key:{exchange.authenticate(self._gateway.keys, ADMIN).key_id}"
        return (await self._login.require(request)).actor

    async def body(self, request: Request, kind: type[_Body]) -> _Body:
        """Read the body, within its limits; a missing one counts as empty.

        Raises InvalidParameter, and what parse_body and read_body raise.
        """
        headers, settings = exchange_of(request).headers, self.settings
        body = await read_body(request.receive, headers, settings.limits.max_body_bytes, settings.timeouts.body_s)
        return parse_body(kind, body or b"{}")

    # Each raises the errors of the function of the same name in accounts.

    async def create_team(self, body: NewTeam, actor: str) -> Team:
        """Create a team."""
        return await teams.create_team(self.database, body.name, actor, body.organisation, policy_of(body.changes()))

    async def warnings(self, account: Team | ApiKey) -> list[str]:
        """Return what is wrong with a team's or key's budget, in sentences."""
        return budget_warnings(
            account.policy, account.models if isinstance(account, ApiKey) else None, await self.unpriced()
        )

    async def unpriced(self) -> list[str]:
        """Return the models that clients are charged nothing for. Raises SQL's own errors."""
        configured = {model for model, payee in self.settings.prices if payee == CLIENTS}
        async with self.database.connect() as connection:
            book = await load_prices(connection)
        return unpriced_models(self.settings.models, configured, book, unix_now_ms())

    async def update_team(self, reference: str, body: TeamChanges, actor: str) -> Team:
        """Change a team, for all its keys immediately."""
        team = await teams.update_team(self.database, reference, body.changes(), actor)
        await self._notify_gateways()
        return team

    async def create_key(self, body: NewKey, actor: str) -> tuple[ApiKey, str]:
        """Create a key; return it with its plaintext, which is not stored."""
        changes = checked_grant(body.changes(), self._models, unix_now_ms())
        grant = Grant(body.team, body.scopes, changes.get("models"), body.expires_unix_ms, policy_of(changes))
        created = await keys.create_key(self.database, body.name, self.settings.key_pepper, grant, actor)
        await self._notify_gateways()
        return created

    async def update_key(self, reference: str, body: KeyChanges, actor: str) -> ApiKey:
        """Change a key."""
        changes = checked_grant(body.changes(), self._models, unix_now_ms())
        key = await keys.update_key(self.database, reference, changes, actor)
        await self._notify_gateways()
        return key

    async def rotate_key(self, reference: str, grace_s: int, actor: str) -> tuple[ApiKey, str]:
        """Give a key a new plaintext and return it; the previous one stays valid for ``grace_s`` more."""
        rotated = await keys.rotate_key(self.database, reference, self.settings.key_pepper, actor, grace_s)
        await self._notify_gateways()
        return rotated

    async def revoke_key(self, reference: str, actor: str, *, stops_running: bool) -> ApiKey:
        """Revoke a key."""
        key = await keys.revoke_key(self.database, reference, actor, stops_running=stops_running)
        await self._notify_gateways()
        return key

    async def _notify_gateways(self) -> None:
        """Make all gateways load the keys now; otherwise they do so within half a minute."""
        try:
            await self._gateway.bus.publish(subjects.KEYS_CHANGED_SUBJECT, b"")
        except BusError as error:
            log.warning("other gateways will see the change within half a minute: %s", error)
