"""``spillway webhooks``: endpoints of teams, their secrets, and what was delivered to them."""

import contextlib
import json
from collections.abc import AsyncIterator
from typing import Annotated, Any

import typer
from sqlalchemy.ext.asyncio import AsyncEngine

from console.admin.views import delivery_view, endpoint_view
from db.accounts.principal import DEFAULT_TEAM_ID
from ledger.webhooks.deliveries import list_deliveries
from ledger.webhooks.endpoints import DEFAULT_GRACE_S, Endpoint, Endpoints
from ledger.webhooks.events import EVENT_TYPES
from ledger.webhooks.secrets import SecretBox
from spillway.cli.connections import database
from spillway.cli.context import ConfigOption, DataOption, out, pepper_of, run_async, running_or_config
from spillway.cli.keys import JsonOption, print_table, show_facts
from spillway.cli.policy import local_time, this_actor
from spillway.config import Config

IdArgument = Annotated[str, typer.Argument(help="The endpoint's id.")]
EventsOption = Annotated[
    list[str] | None, typer.Option("--event", "-e", help=f"A type of event, repeatable: {', '.join(EVENT_TYPES)}.")
]


def create(
    url: Annotated[str, typer.Argument(help="Where events are sent: an https URL with a public address.")],
    event: EventsOption = None,
    team: Annotated[str, typer.Option("--team", "-t", help="The team's id or name.")] = DEFAULT_TEAM_ID,
    as_json: JsonOption = False,
    config: ConfigOption = None,
    data: DataOption = None,
) -> None:
    """Create an endpoint of a team, by default for all types of events. Its secret is shown once."""
    resolved = running_or_config(config, data)

    async def main() -> None:
        async with _endpoints(resolved) as (_, endpoints):
            made, secret = await endpoints.create(team, url, event or EVENT_TYPES, this_actor())
        _show_secret(made, secret, as_json=as_json)

    run_async(main)


def list_(
    team: Annotated[str | None, typer.Option("--team", "-t", help="Of this team alone, by id or name.")] = None,
    as_json: JsonOption = False,
    config: ConfigOption = None,
    data: DataOption = None,
) -> None:
    """List endpoints."""
    resolved = running_or_config(config, data)

    async def main() -> None:
        async with _endpoints(resolved) as (_, endpoints):
            found = await endpoints.list(team)
        if as_json:
            out.print_json(json.dumps([endpoint_view(endpoint) for endpoint in found]))
            return
        rows = (
            (e.endpoint_id, e.team_name, e.url, ", ".join(e.event_types), _state(e), local_time(e.created_unix_ms))
            for e in found
        )
        print_table(("id", "team", "url", "events", "state", "created"), rows)

    run_async(main)


def show(
    endpoint: IdArgument, as_json: JsonOption = False, config: ConfigOption = None, data: DataOption = None
) -> None:
    """Show an endpoint, without its secret."""
    resolved = running_or_config(config, data)

    async def main() -> None:
        async with _endpoints(resolved) as (_, endpoints):
            found = await endpoints.find(endpoint)
        show_facts(endpoint_view(found), as_json=as_json)

    run_async(main)


def update(
    endpoint: IdArgument,
    url: Annotated[str | None, typer.Option(help="A new URL.")] = None,
    event: EventsOption = None,
    enabled: Annotated[
        bool | None, typer.Option("--enable/--disable", help="Send events to it, or give up what waits for it.")
    ] = None,
    as_json: JsonOption = False,
    config: ConfigOption = None,
    data: DataOption = None,
) -> None:
    """Change an endpoint; options not given stay the same."""
    resolved = running_or_config(config, data)
    given: dict[str, Any] = {"url": url, "event_types": event or None, "enabled": enabled}
    changes = {name: value for name, value in given.items() if value is not None}

    async def main() -> None:
        async with _endpoints(resolved) as (_, endpoints):
            changed = await endpoints.update(endpoint, changes, this_actor())
        show_facts(endpoint_view(changed), as_json=as_json)

    run_async(main)


def rotate(
    endpoint: IdArgument,
    grace_s: Annotated[
        int, typer.Option(help="For how many seconds deliveries are signed by the previous secret, too.")
    ] = DEFAULT_GRACE_S,
    as_json: JsonOption = False,
    config: ConfigOption = None,
    data: DataOption = None,
) -> None:
    """Give an endpoint a new secret, which is shown once."""
    resolved = running_or_config(config, data)

    async def main() -> None:
        async with _endpoints(resolved) as (_, endpoints):
            rotated, secret = await endpoints.rotate(endpoint, this_actor(), grace_s)
        _show_secret(rotated, secret, as_json=as_json)

    run_async(main)


def send_test(
    endpoint: IdArgument,
    event: Annotated[str | None, typer.Option("--event", "-e", help="Its type. Default: the endpoint's first.")] = None,
    config: ConfigOption = None,
    data: DataOption = None,
) -> None:
    """Send an event about an object that does not exist; `deliveries` shows how it went."""
    resolved = running_or_config(config, data)

    async def main() -> None:
        async with _endpoints(resolved) as (_, endpoints):
            event_id = await endpoints.send_test(endpoint, event, this_actor())
        out.print(f"{event_id} is on its way", markup=False)

    run_async(main)


def deliveries(
    endpoint: IdArgument,
    limit: Annotated[int, typer.Option(min=1, max=1000, help="How many.")] = 20,
    as_json: JsonOption = False,
    config: ConfigOption = None,
    data: DataOption = None,
) -> None:
    """List the latest deliveries to an endpoint, newest first."""
    resolved = running_or_config(config, data)

    async def main() -> None:
        async with _endpoints(resolved) as (engine, endpoints):
            found = await list_deliveries(engine, (await endpoints.find(endpoint)).endpoint_id, limit)
        if as_json:
            out.print_json(json.dumps([delivery_view(delivery) for delivery in found]))
            return
        columns = ("event", "type", "created", "outcome", "attempts", "last attempt", "next attempt", "error")
        rows = (
            (
                *(d.event_id, d.event_type, local_time(d.created_unix_ms), d.outcome, str(d.attempts)),
                *(local_time(d.attempted_unix_ms), local_time(d.due_unix_ms), d.error or ""),
            )
            for d in found
        )
        print_table(columns, rows)

    run_async(main)


def delete(endpoint: IdArgument, config: ConfigOption = None, data: DataOption = None) -> None:
    """Delete an endpoint with all that is known of its deliveries."""
    resolved = running_or_config(config, data)

    async def main() -> None:
        async with _endpoints(resolved) as (_, endpoints):
            gone = await endpoints.delete(endpoint, this_actor())
        out.print(f"deleted {gone.endpoint_id} ({gone.url})", markup=False, soft_wrap=True)

    run_async(main)


@contextlib.asynccontextmanager
async def _endpoints(config: Config) -> AsyncIterator[tuple[AsyncEngine, Endpoints]]:
    async with database(config) as engine:
        yield engine, Endpoints(engine, config.webhooks, SecretBox(pepper_of(config)))


def _state(endpoint: Endpoint) -> str:
    if not endpoint.enabled:
        return f"disabled: {endpoint.disabled_reason}"
    failing = endpoint.failing_since_unix_ms
    return "enabled" if failing is None else f"failing since {local_time(failing)}"


def _show_secret(endpoint: Endpoint, secret: str, *, as_json: bool) -> None:
    if as_json:
        out.print_json(json.dumps(endpoint_view(endpoint, secret)))
        return
    out.print(secret, markup=False, soft_wrap=True)
    out.print(f"[dim]{endpoint.endpoint_id}: save it now, it cannot be shown again[/dim]")
