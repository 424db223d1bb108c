"""``spillway keys``: API keys and their permissions."""

from collections.abc import Iterable
from typing import Annotated, Any, Final

import typer
from sqlalchemy.ext.asyncio import AsyncEngine

from console.admin.views import key_view
from db.accounts.budgets import budget_warnings, unpriced_models
from db.accounts.checks import checked_grant
from db.accounts.keyring import RELOAD_PERIOD_S
from db.accounts.keys import ApiKey, Grant, create_key, find_key, list_keys, revoke_key, rotate_key, update_key
from db.accounts.principal import DEFAULT_TEAM_ID, INFERENCE, policy_of
from db.accounts.teams import Team, means
from db.prices import load_prices
from gateway.tokenizing.settings import canonical_names
from protocol import subjects
from protocol.errors import BusError, BusTimeout, ExpectedError, NoResponders
from protocol.nats.clock import unix_now_ms
from spillway.cli.account_options import KeyChanges, NewKey, duration_s, limits_text
from spillway.cli.connections import connect_admin, database
from spillway.cli.context import ResolvedConfig, command, err, out, pepper_of, this_actor
from spillway.cli.output import (
    JsonOption,
    local_time,
    print_changed,
    print_object,
    print_objects,
    print_secret,
    zoned_time,
)
from spillway.config import Config

NOTIFY_LIMIT_S: Final = 3.0

ReferenceArgument = Annotated[str, typer.Argument(help="The key's id, a unique prefix of it, or its name.")]

_COLUMNS: Final = {
    "id": lambda key: key.key_id,
    "name": lambda key: key.name,
    "key": lambda key: f"…{key.last_four}",
    "team": lambda key: key.team_name,
    "scopes": lambda key: ", ".join(key.scopes),
    "limits": lambda key: limits_text(key.policy),
    "created": lambda key: local_time(key.created_unix_ms),
    "expires": lambda key: local_time(key.expires_unix_ms),
    "revoked": lambda key: local_time(key.revoked_unix_ms),
}


@command
async def create(
    name: Annotated[str, typer.Argument(help="A name for the key, unique among active keys.")],
    *,
    fields: NewKey,
    as_json: JsonOption = False,
    config: ResolvedConfig,
) -> None:
    """Create an API key and print it. Only its hash is stored: the key cannot be shown again.

    By default, the key can use all models and has no limits. Its limits apply in addition to its team's limits.
    """
    fields = _checked(config, fields)
    grant = Grant(
        fields.get("team", DEFAULT_TEAM_ID),
        fields.get("scopes", (INFERENCE,)),
        fields.get("models"),
        fields.get("expires_unix_ms"),
        policy_of(fields),
    )
    async with database(config) as engine:
        key, plaintext = await create_key(engine, name, pepper_of(config), grant, this_actor())
        warnings = await warnings_of(config, engine, key)
    _print_plaintext(key, plaintext, as_json=as_json)
    print_warnings(warnings)
    await notify_gateways(config)


@command
async def update(
    reference: ReferenceArgument, *, changes: KeyChanges, as_json: JsonOption = False, config: ResolvedConfig
) -> None:
    """Change an API key; options not given stay the same. Running gateways apply the change immediately."""
    checked = _checked(config, changes)
    async with database(config) as engine:
        before = await find_key(engine, reference)
        key = await update_key(engine, before.key_id, checked, this_actor())
        warnings = await warnings_of(config, engine, key)
    print_changed(key_view(before), key_view(key), as_json=as_json)
    print_warnings(warnings)
    await notify_gateways(config)


@command
async def rotate(
    reference: ReferenceArgument,
    *,
    grace: Annotated[str, typer.Option(help="How long the old secret stays valid: 24h, 30m, 7d or 0.")] = "24h",
    as_json: JsonOption = False,
    config: ResolvedConfig,
) -> None:
    """Give an API key a new secret and print it. The old secret stays valid for the grace period."""
    grace_s = duration_s(grace, "--grace")
    async with database(config) as engine:
        key, plaintext = await rotate_key(engine, reference, pepper_of(config), this_actor(), grace_s)
    _print_plaintext(key, plaintext, as_json=as_json)
    if not as_json:
        until = zoned_time(key.previous_until_unix_ms)
        err.print(
            f"[dim]the old secret is valid until {until}[/dim]"
            if until
            else "[dim]the old secret is no longer valid[/dim]"
        )
    await notify_gateways(config)


@command
async def list_(
    *,
    everything: Annotated[bool, typer.Option("--all", help="Include revoked keys.")] = False,
    team: Annotated[str | None, typer.Option("--team", "-t", help="Only keys of this team, by name or id.")] = None,
    as_json: JsonOption = False,
    config: ResolvedConfig,
) -> None:
    """List API keys."""
    async with database(config) as engine:
        keys = await list_keys(engine, include_revoked=everything)
    keys = [key for key in keys if team is None or means(team, key.team_id, key.team_name)]
    print_objects(keys, key_view, _COLUMNS, as_json=as_json)


@command
async def show(reference: ReferenceArgument, *, as_json: JsonOption = False, config: ResolvedConfig) -> None:
    """Show the details of an API key. Its secret is not stored and not shown."""
    async with database(config) as engine:
        print_object(key_view(await find_key(engine, reference)), as_json=as_json)


@command
async def revoke(
    reference: ReferenceArgument,
    *,
    stop_running: Annotated[bool, typer.Option("--stop-running", help="Also end its running requests.")] = False,
    config: ResolvedConfig,
) -> None:
    """Revoke an API key. Running gateways reject it immediately, or within 30 seconds if the queue server is down.

    Its waiting requests end. Its running requests are completed, unless you use --stop-running. A note is printed if
    no gateway could be notified.
    """
    async with database(config) as engine:
        key = await revoke_key(engine, reference, this_actor(), stops_running=stop_running)
    out.print(f"revoked {key.key_id} ({key.name})", markup=False)
    await notify_gateways(config)


async def warnings_of(config: Config, engine: AsyncEngine, account: Team | ApiKey) -> list[str]:
    """Return warnings about a team's or key's budget, as sentences. Raises SQL errors."""
    async with engine.connect() as connection:
        book = await load_prices(connection)
    priced = {name for name, model in config.models.items() if model.price is not None}
    unpriced = unpriced_models(config.models, priced, book, unix_now_ms())
    return budget_warnings(account.policy, account.models if isinstance(account, ApiKey) else None, unpriced)


def print_warnings(warnings: Iterable[str]) -> None:
    """Print the sentences of ``warnings_of`` on stderr."""
    for text in warnings:
        err.print(f"warning: {text}", style="yellow", markup=False, soft_wrap=True)


async def notify_gateways(config: Config) -> None:
    """Notify running gateways of a change and wait for one to load it; print a note if none confirms.

    Raises nothing: the change is stored, and the command must print its result.
    """
    reason = await _why_not_notified(config)
    if reason:
        err.print(
            f"note: no running gateway could be notified: {reason}. Running gateways apply this change within "
            f"{RELOAD_PERIOD_S:g} s.",
            style="yellow",
            markup=False,
            soft_wrap=True,
        )


async def _why_not_notified(config: Config) -> str:
    """Notify the gateways; return the reason if none has confirmed, empty if one has."""
    if not config.nats.urls:
        return f"nats.urls is not set, and no `spillway up` is running in {config.data_dir}"
    try:
        bus = await connect_admin(config, "spillway keys", NOTIFY_LIMIT_S)
    except ExpectedError as error:
        return str(error)
    try:
        await bus.request(subjects.KEYS_CHANGED_SUBJECT, b"", timeout_s=NOTIFY_LIMIT_S)
    except NoResponders:
        return "no gateway is connected to the queue server"
    except BusTimeout:
        return f"no gateway confirmed within {NOTIFY_LIMIT_S:g} s"
    except BusError as error:
        return str(error)
    finally:
        await bus.close()
    return ""


def _checked(config: Config, changes: dict[str, Any]) -> dict[str, Any]:
    names = canonical_names(config.models)
    if changes.get("models") == ["all"] and "all" not in names:
        changes = {**changes, "models": None}
    return checked_grant(changes, names, unix_now_ms())


def _print_plaintext(key: ApiKey, plaintext: str, *, as_json: bool) -> None:
    print_secret(key_view(key, plaintext), plaintext, as_json=as_json)
    if key.expires_unix_ms is not None and not as_json:
        err.print(f"[dim]valid until {zoned_time(key.expires_unix_ms)}[/dim]", soft_wrap=True)
