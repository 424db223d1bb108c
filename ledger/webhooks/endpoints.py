"""Endpoints of teams: create, list, rotate the secret, disable, enable, delete, test. Each change is audited."""

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from sqlalchemy import RowMapping, delete, func, insert, select, update
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from db.accounts.audit import Change, difference, record
from db.accounts.errors import InvalidField, NotFound, UnknownTeam
from db.accounts.teams import find_team, means
from db.accounts.token import new_id
from db.engine import changing
from db.tables import TeamRow, WebhookDeliveryRow, WebhookEndpointRow
from ledger.webhooks.addresses import BadUrl, checked_url
from ledger.webhooks.deliveries import end_waiting, new_row
from ledger.webhooks.events import EVENT_TYPES, EventType, new_event
from ledger.webhooks.secrets import SecretBox, new_secret
from ledger.webhooks.settings import WebhookSettings
from protocol.nats.clock import unix_now_ms

MAX_ENDPOINTS: Final = 20  # of a team
DEFAULT_GRACE_S: Final = 24 * 3600
MAX_GRACE_S: Final = 30 * 24 * 3600
BY_OPERATOR: Final = "disabled by an operator"
_TEST_IDS: Final = {"response": "resp_test", "batch": "batch_test", "team": "team_test"}

_ENDPOINTS: Final = WebhookEndpointRow.__table__


class UnknownEndpoint(NotFound):
    """No endpoint has this id."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """An endpoint, without its secret. See db.tables.WebhookEndpointRow."""

    endpoint_id: str
    team_id: str
    team_name: str
    url: str
    event_types: tuple[str, ...]
    disabled_reason: str | None  # None: enabled
    failing_since_unix_ms: int | None
    previous_until_unix_ms: int | None
    created_unix_ms: int

    @property
    def enabled(self) -> bool:
        """Whether events are sent to it."""
        return self.disabled_reason is None


class Endpoints:
    """The endpoints in SQL. All methods also raise SQL errors."""

    def __init__(self, engine: AsyncEngine, settings: WebhookSettings, box: SecretBox) -> None:
        self._engine = engine
        self._settings = settings
        self._box = box

    async def create(self, team: str, url: str, event_types: Sequence[str], actor: str) -> tuple[Endpoint, str]:
        """Create an endpoint of a team, referenced by id or name; return it and its secret, which is not shown again.

        Raises InvalidField.
        """
        wanted = _checked_types(event_types)
        self._check_url(url)
        secret = new_secret()
        async with changing(self._engine) as connection:
            try:
                owner = await find_team(connection, team, for_update=True)
            except UnknownTeam as error:
                raise InvalidField("team", str(error)) from error
            count = select(func.count()).select_from(_ENDPOINTS).where(_ENDPOINTS.c.team_id == owner.team_id)
            if (await connection.execute(count)).scalar_one() >= MAX_ENDPOINTS:
                raise InvalidField("team", f"already has {MAX_ENDPOINTS} endpoints, the maximum")
            made = Endpoint(new_id("wh_"), owner.team_id, owner.name, url, wanted, None, None, None, unix_now_ms())
            row = {
                "id": made.endpoint_id,
                "team_id": made.team_id,
                "url": url,
                "event_types": wanted,
                "secret": self._box.seal(secret, made.endpoint_id),
                "created_unix_ms": made.created_unix_ms,
            }
            await connection.execute(insert(WebhookEndpointRow).values(row))
            facts = {"team_id": made.team_id, "url": url, "event_types": wanted}
            await record(connection, Change(actor, "webhook.create", made.endpoint_id, None, facts))
        return made, secret

    async def list(self, team: str | None = None) -> Sequence[Endpoint]:
        """Return all endpoints, or those of one team by its id or name, oldest first."""
        wanted = _select().order_by(_ENDPOINTS.c.created_unix_ms, _ENDPOINTS.c.id)
        async with self._engine.connect() as connection:
            found = [_endpoint(row) for row in (await connection.execute(wanted)).mappings()]
        return [endpoint for endpoint in found if team is None or means(team, endpoint.team_id, endpoint.team_name)]

    async def find(self, endpoint_id: str) -> Endpoint:
        """Return the endpoint with this id. Raises UnknownEndpoint."""
        async with self._engine.connect() as connection:
            return await _find(connection, endpoint_id)

    async def update(self, endpoint_id: str, changes: Mapping[str, Any], actor: str) -> Endpoint:
        """Change ``url``, ``event_types`` or ``enabled``. Disabling gives up its waiting deliveries.

        Raises InvalidField and UnknownEndpoint.
        """
        async with changing(self._engine) as connection:
            before = await _find(connection, endpoint_id, for_update=True)
            after = before
            if "url" in changes:
                self._check_url(changes["url"])
                after = replace(after, url=changes["url"])
            if "event_types" in changes:
                after = replace(after, event_types=_checked_types(changes["event_types"]))
            if "enabled" in changes and changes["enabled"] != before.enabled:
                reason = None if changes["enabled"] else BY_OPERATOR
                after = replace(after, disabled_reason=reason, failing_since_unix_ms=None)
            changed = difference(_settings(before), _settings(after))
            if changed is not None:
                row = {**changed[1], "failing_since_unix_ms": after.failing_since_unix_ms}
                await connection.execute(_of(endpoint_id).values(row))
                await record(connection, Change(actor, "webhook.update", endpoint_id, *changed))
            if not after.enabled:
                await end_waiting(connection, endpoint_id, "the endpoint was disabled")
        return after

    async def rotate(self, endpoint_id: str, actor: str, grace_s: int = DEFAULT_GRACE_S) -> tuple[Endpoint, str]:
        """Give an endpoint a new secret and return it. For ``grace_s``, deliveries are signed with both.

        Raises InvalidField and UnknownEndpoint.
        """
        if not 0 <= grace_s <= MAX_GRACE_S:
            raise InvalidField("grace_s", f"must be 0 to {MAX_GRACE_S}")
        secret = new_secret()
        until_unix_ms = unix_now_ms() + 1000 * grace_s if grace_s else None
        async with changing(self._engine) as connection:
            before = await _find(connection, endpoint_id, for_update=True)
            row = {
                "secret": self._box.seal(secret, endpoint_id),
                "previous_secret": _ENDPOINTS.c.secret if grace_s else None,
                "previous_until_unix_ms": until_unix_ms,
            }
            await connection.execute(_of(endpoint_id).values(row))
            await record(connection, Change(actor, "webhook.rotate", endpoint_id, None, {"grace_s": grace_s}))
        return replace(before, previous_until_unix_ms=until_unix_ms), secret

    async def delete(self, endpoint_id: str, actor: str) -> Endpoint:
        """Delete an endpoint and the records of its deliveries. Raises UnknownEndpoint."""
        async with changing(self._engine) as connection:
            before = await _find(connection, endpoint_id, for_update=True)
            await connection.execute(delete(WebhookDeliveryRow).where(WebhookDeliveryRow.endpoint_id == endpoint_id))
            await connection.execute(delete(WebhookEndpointRow).where(WebhookEndpointRow.id == endpoint_id))
            facts = {"team_id": before.team_id, "url": before.url, "event_types": before.event_types}
            await record(connection, Change(actor, "webhook.delete", endpoint_id, facts, None))
        return before

    async def send_test(self, endpoint_id: str, event_type: str | None, actor: str) -> str:
        """Send an event of this type, or of the endpoint's first, to an endpoint; return the event's id.

        Its object does not exist. Raises InvalidField and UnknownEndpoint.
        """
        now_unix_ms = unix_now_ms()
        async with changing(self._engine) as connection:
            endpoint = await _find(connection, endpoint_id)
            wanted = _checked_types([event_type or endpoint.event_types[0]], "event_type")[0]
            if not endpoint.enabled:
                raise InvalidField("endpoint", "is disabled")
            data = {"id": _TEST_IDS[wanted.partition(".")[0]]}
            identity = f"evt_test_{secrets.token_hex(12)}"
            event = new_event(endpoint.team_id, wanted, identity, data, created_unix_s=now_unix_ms // 1000)
            await connection.execute(insert(WebhookDeliveryRow).values(new_row(event, endpoint_id, now_unix_ms)))
            await record(connection, Change(actor, "webhook.test", endpoint_id, None, {"event_id": identity}))
        return identity

    def _check_url(self, url: str) -> None:
        try:
            checked_url(url, self._settings)
        except BadUrl as error:
            raise InvalidField("url", str(error)) from error


def _checked_types(event_types: Sequence[str], field: str = "event_types") -> tuple[EventType, ...]:
    """Return the types without duplicates, in the order of EVENT_TYPES. Raises InvalidField."""
    unknown = sorted(set(event_types).difference(EVENT_TYPES))
    if unknown:
        raise InvalidField(field, f"{unknown[0]!r} is not one of {', '.join(EVENT_TYPES)}")
    if not event_types:
        raise InvalidField(field, f"must have at least one of {', '.join(EVENT_TYPES)}")
    return tuple(known for known in EVENT_TYPES if known in event_types)


def _select() -> Any:  # noqa: ANN401  # a Select of many columns
    return select(_ENDPOINTS, TeamRow.name.label("team_name")).join(TeamRow, TeamRow.id == _ENDPOINTS.c.team_id)


async def _find(connection: AsyncConnection, endpoint_id: str, *, for_update: bool = False) -> Endpoint:
    if not endpoint_id.isprintable():
        raise UnknownEndpoint("no webhook endpoint has this id")
    wanted = _select().where(_ENDPOINTS.c.id == endpoint_id)
    if for_update:
        wanted = wanted.with_for_update(of=_ENDPOINTS)
    row = (await connection.execute(wanted)).mappings().first()
    if row is None:
        raise UnknownEndpoint(f"no webhook endpoint has the id {endpoint_id!r}")
    return _endpoint(row)


def _of(endpoint_id: str) -> Any:  # noqa: ANN401  # an Update
    return update(WebhookEndpointRow).where(WebhookEndpointRow.id == endpoint_id)


def _settings(endpoint: Endpoint) -> dict[str, Any]:
    """Return the columns of an endpoint that can be changed, except its secret."""
    return {"url": endpoint.url, "event_types": endpoint.event_types, "disabled_reason": endpoint.disabled_reason}


def _endpoint(row: RowMapping) -> Endpoint:
    fields = (
        "team_id",
        "team_name",
        "url",
        "event_types",
        "disabled_reason",
        "failing_since_unix_ms",
        "previous_until_unix_ms",
        "created_unix_ms",
    )
    return Endpoint(endpoint_id=row["id"], **{name: row[name] for name in fields})
