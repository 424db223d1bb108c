"""``spillway webhooks``: webhook endpoints of teams, their secrets and their deliveries."""

import contextlib
from collections.abc import AsyncIterator
from typing import Annotated, Any, Final

import typer
from sqlalchemy.ext.asyncio import AsyncEngine

from console.admin.webhook_views import delivery_view, endpoint_view
from db.accounts.principal import DEFAULT_TEAM_ID
from ledger.webhooks.deliveries import list_deliveries
from ledger.webhooks.endpoints import DEFAULT_GRACE_S, Endpoint, Endpoints
from ledger.webhooks.events import EVENT_TYPES
from ledger.webhooks.secrets import SecretBox
from spillway.cli.connections import database
from spillway.cli.context import ResolvedConfig, command, out, pepper_of, this_actor
from spillway.cli.output import JsonOption, local_time, print_changed, print_object, print_objects, print_secret
from spillway.config import Config

IdArgument = Annotated[str, typer.Argument(help="The endpoint's id.")]
EventsOption = Annotated[
    list[str] | None, typer.Option("--event", "-e", help=f"An event type. Repeatable: {', '.join(EVENT_TYPES)}.")
]


@command
async def create(
    url: Annotated[str, typer.Argument(help="The URL that receives events: https, with a public address.")],
    *,
    event: EventsOption = None,
    team: Annotated[str, typer.Option("--team", "-t", help="The team's id or name.")] = DEFAULT_TEAM_ID,
    as_json: JsonOption = False,
    config: ResolvedConfig,
) -> None:
    """Create an endpoint for a team, by default for all event types. Its secret is shown once."""
    async with _endpoints(config) as (_, endpoints):
        created, secret = await endpoints.create(team, url, event or EVENT_TYPES, this_actor())
    print_secret(endpoint_view(created, secret), secret, as_json=as_json)


@command
async def list_(
    *,
    team: Annotated[
        str | None, typer.Option("--team", "-t", help="Only endpoints of this team, by id or name.")
    ] = None,
    as_json: JsonOption = False,
    config: ResolvedConfig,
) -> None:
    """List endpoints."""
    async with _endpoints(config) as (_, endpoints):
        found = await endpoints.list(team)
    print_objects(found, endpoint_view, _ENDPOINT_COLUMNS, as_json=as_json)


@command
async def show(endpoint: IdArgument, *, as_json: JsonOption = False, config: ResolvedConfig) -> None:
    """Show an endpoint, without its secret."""
    async with _endpoints(config) as (_, endpoints):
        print_object(endpoint_view(await endpoints.find(endpoint)), as_json=as_json)


@command
async def update(
    endpoint: IdArgument,
    *,
    url: Annotated[str | None, typer.Option(help="A new URL.")] = None,
    event: EventsOption = None,
    enabled: Annotated[
        bool | None,
        typer.Option("--enable/--disable", help="Resume deliveries, or stop them and discard waiting events."),
    ] = None,
    as_json: JsonOption = False,
    config: ResolvedConfig,
) -> None:
    """Change an endpoint; options not given stay the same."""
    given: dict[str, Any] = {"url": url, "event_types": event, "enabled": enabled}
    changes = {name: value for name, value in given.items() if value is not None}
    async with _endpoints(config) as (_, endpoints):
        before = await endpoints.find(endpoint)
        after = await endpoints.update(endpoint, changes, this_actor())
    print_changed(endpoint_view(before), endpoint_view(after), as_json=as_json)


@command
async def rotate(
    endpoint: IdArgument,
    *,
    grace_s: Annotated[
        int, typer.Option(help="Seconds for which deliveries are also signed with the previous secret.")
    ] = DEFAULT_GRACE_S,
    as_json: JsonOption = False,
    config: ResolvedConfig,
) -> None:
    """Give an endpoint a new secret, which is shown once."""
    async with _endpoints(config) as (_, endpoints):
        rotated, secret = await endpoints.rotate(endpoint, this_actor(), grace_s)
    print_secret(endpoint_view(rotated, secret), secret, as_json=as_json)


@command
async def send_test(
    endpoint: IdArgument,
    *,
    event: Annotated[
        str | None, typer.Option("--event", "-e", help="The event's type. Default: the endpoint's first type.")
    ] = None,
    config: ResolvedConfig,
) -> None:
    """Send a test event about an object that does not exist. `deliveries` shows the outcome."""
    async with _endpoints(config) as (_, endpoints):
        event_id = await endpoints.send_test(endpoint, event, this_actor())
    out.print(f"{event_id} is queued for delivery", markup=False)


@command
async def deliveries(
    endpoint: IdArgument,
    *,
    limit: Annotated[int, typer.Option(min=1, max=1000, help="Maximum number, newest first.")] = 20,
    as_json: JsonOption = False,
    config: ResolvedConfig,
) -> None:
    """List the latest deliveries to an endpoint, newest first."""
    async with _endpoints(config) as (engine, endpoints):
        found = await list_deliveries(engine, (await endpoints.find(endpoint)).endpoint_id, limit)
    print_objects(found, delivery_view, _DELIVERY_COLUMNS, as_json=as_json)


@command
async def delete(endpoint: IdArgument, *, config: ResolvedConfig) -> None:
    """Delete an endpoint and the records of its deliveries."""
    async with _endpoints(config) as (_, endpoints):
        gone = await endpoints.delete(endpoint, this_actor())
    out.print(f"deleted {gone.endpoint_id} ({gone.url})", markup=False, soft_wrap=True)


@contextlib.asynccontextmanager
async def _endpoints(config: Config) -> AsyncIterator[tuple[AsyncEngine, Endpoints]]:
    async with database(config) as engine:
        yield engine, Endpoints(engine, config.webhooks, SecretBox(pepper_of(config)))


def _state(endpoint: Endpoint) -> str:
    if not endpoint.enabled:
        return f"disabled: {endpoint.disabled_reason}"
    failing = endpoint.failing_since_unix_ms
    return "enabled" if failing is None else f"failing since {local_time(failing)}"


_ENDPOINT_COLUMNS: Final = {
    "id": lambda endpoint: endpoint.endpoint_id,
    "team": lambda endpoint: endpoint.team_name,
    "url": lambda endpoint: endpoint.url,
    "events": lambda endpoint: ", ".join(endpoint.event_types),
    "state": _state,
    "created": lambda endpoint: local_time(endpoint.created_unix_ms),
}
_DELIVERY_COLUMNS: Final = {
    "event": lambda delivery: delivery.event_id,
    "type": lambda delivery: delivery.event_type,
    "created": lambda delivery: local_time(delivery.created_unix_ms),
    "outcome": lambda delivery: delivery.outcome,
    "attempts": lambda delivery: delivery.attempts,
    "last attempt": lambda delivery: local_time(delivery.attempted_unix_ms),
    "next attempt": lambda delivery: local_time(delivery.due_unix_ms),
    "error": lambda delivery: delivery.error or "",
}
