"""The operations behind the admin API: authenticate, read the body, apply a change, notify the gateways.

The dashboard's forms use the same operations. ``who`` is the person who asks: each operation checks their role.
"""

import asyncio
import hashlib
import logging
from dataclasses import asdict
from typing import Final, TypeVar

from fastapi import Request
from sqlalchemy.ext.asyncio import AsyncEngine

from console.admin.schema import AdminBody, KeyChanges, NewKey, NewTeam, TeamChanges
from console.login.login import Login
from console.login.sessions import Session
from console.rules import API, admit
from db.accounts import keys, teams
from db.accounts.audit import values_set_by_others
from db.accounts.budgets import budget_warnings, unpriced_models
from db.accounts.checks import checked_grant
from db.accounts.errors import InvalidField, NotFound, UnknownKey, UnknownTeam
from db.accounts.keys import ApiKey, Grant
from db.accounts.principal import ADMIN, INFERENCE, NO_POLICY, policy_of
from db.accounts.roles import Action, Person, check_member_key, check_team_key, check_team_scopes, may_everything
from db.accounts.teams import Team
from db.money import CLIENTS
from db.prices import load_prices
from gateway.api.fields import parse_body
from gateway.errors import LedgerUnavailable
from gateway.http.body import read_body
from gateway.http.pages import exchange_of
from gateway.mount import GatewayParts
from gateway.tokenizing.settings import canonical_names
from ledger.webhooks.endpoints import Endpoint, Endpoints, UnknownEndpoint
from protocol import subjects
from protocol.errors import BusError
from protocol.nats.clock import unix_now_ms

PLAYGROUND_GRACE_S: Final = 3600
KEY_LOADED_STEPS: Final = 250  # 5 s: gateways load a new key within a fraction of a second, unless the queue is down
KEY_LOADED_STEP_S: Final = 0.02
NAME_DIGEST_CHARS: Final = 20

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

    async def admit(self, request: Request) -> None:
        """Let a client use a route of the admin API: by their key if they send one, else by their session.

        Raises InvalidApiKey, MissingScope, LoginRequired, CrossOriginRequest, NotAllowed, RoleNotAllowed, and SQL's own
        errors.
        """
        exchange = exchange_of(request)
        if b"authorization" in exchange.headers:
            person = may_everything(f"key:{exchange.authenticate(self._gateway.keys, ADMIN).key_id}")
        else:
            person = (await self._login.require(request)).person
        admit(request, person, API)

    async def body(self, request: Request, kind: type[_Body]) -> _Body:
        """Read the body, within its limits; a missing one counts as empty.

        Raises InvalidParameter, and what parse_body and read_body raise.
        """
        headers, settings = exchange_of(request).headers, self.settings
        body = await read_body(request.receive, headers, settings.limits.max_body_bytes, settings.timeouts.body_s)
        return parse_body(kind, body or b"{}")

    # Each raises the errors of the function of the same name in accounts, and NotAllowed. What a person does not see
    # does not exist for them.

    async def find_team(self, reference: str, who: Person) -> Team:
        """Return a team that this person sees."""
        async with self.database.connect() as connection:
            try:
                team = await teams.find_team(connection, reference)
            except UnknownTeam:
                if who.team_ids is None:
                    raise
                team = None
        if team is None or not who.sees_team(team.team_id):
            raise UnknownTeam(teams.not_found("team", reference))
        return team

    async def find_key(self, reference: str, who: Person) -> ApiKey:
        """Return a key that this person sees."""
        try:
            key = await keys.find_key(self.database, reference)
        except NotFound:
            if who.team_ids is None:
                raise
            key = None
        if key is None or not who.sees_team(key.team_id):
            raise UnknownKey(teams.not_found("key", reference))
        return key

    async def list_keys(self, who: Person, *, include_revoked: bool = False) -> list[ApiKey]:
        """Return the keys that this person sees, oldest first."""
        found = await keys.list_keys(self.database, include_revoked=include_revoked)
        return [key for key in found if who.sees_team(key.team_id)]

    async def list_teams(self, who: Person) -> list[Team]:
        """Return the teams that this person sees, oldest first."""
        return [team for team in await teams.list_teams(self.database) if who.sees_team(team.team_id)]

    async def create_team(self, body: NewTeam, who: Person) -> Team:
        policy = policy_of(body.changes())
        return await teams.create_team(self.database, body.name, who.actor, body.organisation, policy)

    async def warnings(self, account: Team | ApiKey) -> list[str]:
        """Return warnings about a team's or key's budget."""
        return budget_warnings(
            account.policy, account.models if isinstance(account, ApiKey) else None, await self.unpriced()
        )

    async def unpriced(self) -> list[str]:
        """Return the models that clients are charged nothing for. Raises SQL's own errors."""
        configured = {model for model, payee in self.settings.prices if payee == CLIENTS}
        async with self.database.connect() as connection:
            book = await load_prices(connection)
        return unpriced_models(self.settings.models, configured, book, unix_now_ms())

    async def update_team(self, reference: str, body: TeamChanges, who: Person, version: str | None = None) -> Team:
        """Change a team, for all its keys immediately; ``version``: that it must still have."""
        team = await teams.update_team(self.database, reference, body.changes(), who.actor, version=version)
        await self._notify_gateways()
        return team

    async def create_key(self, body: NewKey, who: Person) -> tuple[ApiKey, str]:
        """Create a key; return it with its plaintext, which is not stored."""
        changes = checked_grant(body.changes(), self._models, unix_now_ms())
        grant = Grant(body.team, body.scopes, changes.get("models"), body.expires_unix_ms, policy_of(changes))
        if who.team_ids is not None:
            team = await self.team_of("make_keys", body.team, who)
            check_team_scopes(grant.scopes)
            check_team_key(NO_POLICY, grant.policy, team.policy)
        created = await keys.create_key(self.database, body.name, self.settings.key_pepper, grant, who.actor)
        await self._notify_gateways()
        return created

    async def update_key(self, reference: str, body: KeyChanges, who: Person, version: str | None = None) -> ApiKey:
        """Change a key; ``version``: that it must still have."""
        changes = checked_grant(body.changes(), self._models, unix_now_ms())
        before = await self.changeable_key(reference, who)
        if who.team_ids is not None:
            check_team_scopes((*before.scopes, *changes.get("scopes", ())))
            team = await self.team_of("make_keys", changes.get("team", before.team_id), who)
            policy = teams.changed_policy(before.policy, changes)
            check_team_key(before.policy, policy, team.policy)
            if who.teams[before.team_id] == "member":
                after = {**before.settings, **changes, **asdict(policy)}
                check_member_key(
                    before.settings, after, await values_set_by_others(self.database, before.key_id, who.actor)
                )
            version = version or before.version  # what was checked is what is changed
        key = await keys.update_key(self.database, before.key_id, changes, who.actor, version=version)
        await self._notify_gateways()
        return key

    async def playground_key(self, team: str, session: Session) -> tuple[ApiKey, str]:
        """Return the user's key for the playground in a team, with a new plaintext; it ends with the session.

        The plaintext before stays valid for a while, for another tab. Raises LedgerUnavailable if this gateway does not
        come to know it.
        """
        who = session.person
        owner = await self.team_of("use_playground", team, who)
        name = _playground_name(session.user, owner.name)
        found = [key for key in await self.list_keys(who) if key.name == name and key.created_by == who.actor]
        if found:
            changes = {"team": owner.team_id, "scopes": (INFERENCE,), "expires_unix_ms": session.ends_unix_ms}
            await keys.update_key(self.database, found[0].key_id, changes, who.actor)
            pepper, grace_s = self.settings.key_pepper, PLAYGROUND_GRACE_S
            made = await keys.rotate_key(self.database, found[0].key_id, pepper, who.actor, grace_s)
        else:
            grant = Grant(owner.team_id, expires_unix_ms=session.ends_unix_ms)
            made = await keys.create_key(self.database, name, self.settings.key_pepper, grant, who.actor)
        await self._notify_gateways()
        await self._until_known(made[1])
        return made

    async def _until_known(self, token: str) -> None:
        """Wait until this gateway accepts a new key; the others load it at the same time."""
        for _ in range(KEY_LOADED_STEPS):
            if self._gateway.keys.authenticate(token) is not None:
                return
            await asyncio.sleep(KEY_LOADED_STEP_S)
        raise LedgerUnavailable("The new key is not loaded yet. Try again in 30 seconds.")

    async def rotate_key(self, reference: str, grace_s: int, who: Person) -> tuple[ApiKey, str]:
        """Give a key a new plaintext and return it; the previous one stays valid for ``grace_s`` more."""
        before = await self.changeable_key(reference, who)
        if who.team_ids is not None:  # a new plaintext of a key with other scopes would be a way to them
            check_team_scopes(before.scopes)
        rotated = await keys.rotate_key(self.database, before.key_id, self.settings.key_pepper, who.actor, grace_s)
        await self._notify_gateways()
        return rotated

    async def revoke_key(self, reference: str, who: Person, *, stops_running: bool) -> ApiKey:
        before = await self.changeable_key(reference, who)
        key = await keys.revoke_key(self.database, before.key_id, who.actor, stops_running=stops_running)
        await self._notify_gateways()
        return key

    async def find_webhook(self, endpoint_id: str, who: Person) -> Endpoint:
        """Return a webhook endpoint of a team whose webhooks this person manages."""
        endpoint = await self.webhooks.find(endpoint_id)
        if not who.may("manage_webhooks", endpoint.team_id):
            raise UnknownEndpoint(f"no webhook endpoint has the id {endpoint_id!r}")
        return endpoint

    async def list_webhooks(self, who: Person, team: str | None = None) -> list[Endpoint]:
        """Return the webhook endpoints of the teams whose webhooks this person manages."""
        found = await self.webhooks.list(team)
        return [endpoint for endpoint in found if who.may("manage_webhooks", endpoint.team_id)]

    async def audited_subjects(self, who: Person) -> frozenset[str] | None:
        """Return the ids of the objects whose audit entries a person may read; None: all."""
        read = who.teams_for("see_audit")
        if read is None:
            return None
        of_teams = [key.key_id for key in await self.list_keys(who, include_revoked=True) if key.team_id in read]
        return frozenset({*read, *of_teams, *(one.endpoint_id for one in await self.list_webhooks(who))})

    async def team_of(self, action: Action, reference: str, who: Person) -> Team:
        """Return the team of a new object."""
        try:
            team = await self.find_team(reference, who)
        except UnknownTeam as error:
            raise InvalidField("team", str(error)) from error
        who.require(action, team.team_id)
        return team

    async def changeable_key(self, reference: str, who: Person) -> ApiKey:
        """Return a key that this person may change."""
        key = await self.find_key(reference, who)
        who.require("change_keys", key.team_id, key.created_by)
        return key

    async def _notify_gateways(self) -> None:
        """Make all gateways load the keys now; otherwise they do so within half a minute."""
        try:
            await self._gateway.bus.publish(subjects.KEYS_CHANGED_SUBJECT, b"")
        except BusError as error:
            log.warning("other gateways apply the change within 30 s: %s", error)


def _playground_name(user: str, team: str) -> str:
    """Return the name of a user's key for the playground in a team."""
    name = f"playground of {user} in {team}".replace("/", "-")
    if len(name) <= teams.MAX_NAME_CHARS:
        return name
    return f"playground {hashlib.sha256(name.encode()).hexdigest()[:NAME_DIGEST_CHARS]}"
