"""``spillway keys``: API keys and their permissions."""

import json
from collections.abc import Iterable
from typing import Annotated, Any, Final

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from console.admin.views import key_view
from db.accounts.checks import checked_grant
from db.accounts.keyring import RELOAD_PERIOD_S
from db.accounts.keys import ApiKey, Grant, create_key, find_key, list_keys, revoke_key, rotate_key, update_key
from db.accounts.principal import DEFAULT_TEAM_ID, INFERENCE, SCOPES, policy_of
from db.accounts.teams import means
from gateway.tokenizing.settings import canonical_names
from protocol import subjects
from protocol.errors import BusError, BusTimeout, ExpectedError, NoResponders
from protocol.nats.clock import unix_now_ms
from spillway.cli.connections import connect_admin, database
from spillway.cli.context import ConfigOption, DataOption, err, out, pepper_of, run_async, running_or_config
from spillway.cli.policy import (
    BatchOption,
    BudgetOption,
    ConcurrentOption,
    HostedOption,
    LogPayloadOption,
    RedactOption,
    RetentionOption,
    RpmOption,
    TpmOption,
    TrainOption,
    TrustedOption,
    WeightOption,
    duration_s,
    expiry_unix_ms,
    limits_text,
    local_time,
    policy_changes,
    this_actor,
    zoned_time,
)
from spillway.config import Config

NOTIFY_LIMIT_S: Final = 3.0
TABLE_WIDTH_CHARS: Final = 140

ReferenceArgument = Annotated[str, typer.Argument(help="The key's id, a unique prefix of it, or its name.")]
TeamOption = Annotated[str | None, typer.Option("--team", "-t", help="Its team, by name or id. `default`: none.")]
ScopeOption = Annotated[
    list[str] | None,
    typer.Option("--scope", help=f"A scope: {', '.join(SCOPES)}. Repeatable."),
]
ModelOption = Annotated[
    list[str] | None, typer.Option("--model", "-m", help="A model it may use; repeatable. `all`: all.")
]
ExpiresOption = Annotated[
    str | None,
    typer.Option(
        "--expires",
        help="Expiry: 90d, 12h, 2027-01-31 (00:00 in this machine's time zone), 2027-01-31T18:00Z or never.",
    ),
]
StopRunningOption = Annotated[bool, typer.Option("--stop-running", help="Also end its running requests.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON, as in the admin API.")]


def create(
    name: Annotated[str, typer.Argument(help="The purpose of the key; unique among active keys.")],
    team: TeamOption = None,
    scope: ScopeOption = None,
    model: ModelOption = None,
    expires: ExpiresOption = None,
    rpm: RpmOption = None,
    tpm: TpmOption = None,
    concurrent: ConcurrentOption = None,
    budget: BudgetOption = None,
    weight: WeightOption = None,
    batch_only: BatchOption = None,
    log_payload: LogPayloadOption = None,
    train_ok: TrainOption = None,
    redact: RedactOption = None,
    retention_days: RetentionOption = None,
    allow_hosted: HostedOption = None,
    trusted_only: TrustedOption = None,
    as_json: JsonOption = False,
    config: ConfigOption = None,
    data: DataOption = None,
) -> None:
    """Create an API key and print it. Only its hash is stored, so it cannot be shown again.

    Without options it may generate with all models, without limits of its own. Limits apply in addition to its team's.
    """
    resolved = running_or_config(config, data)
    changes = _key_changes(resolved, team=team, scope=scope, model=model, expires=expires) | policy_changes(
        rpm=rpm, tpm=tpm, concurrent=concurrent, budget=budget, weight=weight, batch_only=batch_only,
        log_payload=log_payload, train_ok=train_ok, redact=redact, retention_days=retention_days,
        allow_hosted=allow_hosted, trusted_only=trusted_only,
    )  # fmt: skip

    async def main() -> None:
        grant = Grant(
            changes.get("team", DEFAULT_TEAM_ID),
            changes.get("scopes", (INFERENCE,)),
            _checked(resolved, changes).get("models"),
            changes.get("expires_unix_ms"),
            policy_of(changes),
        )
        async with database(resolved) as engine:
            key, plaintext = await create_key(engine, name, pepper_of(resolved), grant, this_actor())
        _show_token(key, plaintext, as_json=as_json)
        await notify_gateways(resolved)

    run_async(main)


def update(
    reference: ReferenceArgument,
    name: Annotated[str | None, typer.Option(help="A new name.")] = None,
    team: TeamOption = None,
    scope: ScopeOption = None,
    model: ModelOption = None,
    expires: ExpiresOption = None,
    rpm: RpmOption = None,
    tpm: TpmOption = None,
    concurrent: ConcurrentOption = None,
    budget: BudgetOption = None,
    weight: WeightOption = None,
    batch_only: BatchOption = None,
    log_payload: LogPayloadOption = None,
    train_ok: TrainOption = None,
    redact: RedactOption = None,
    retention_days: RetentionOption = None,
    allow_hosted: HostedOption = None,
    trusted_only: TrustedOption = None,
    as_json: JsonOption = False,
    config: ConfigOption = None,
    data: DataOption = None,
) -> None:
    """Change an API key; options not given stay the same. Running gateways apply the change immediately."""
    resolved = running_or_config(config, data)
    changes = _key_changes(resolved, team=team, scope=scope, model=model, expires=expires) | policy_changes(
        rpm=rpm, tpm=tpm, concurrent=concurrent, budget=budget, weight=weight, batch_only=batch_only,
        log_payload=log_payload, train_ok=train_ok, redact=redact, retention_days=retention_days,
        allow_hosted=allow_hosted, trusted_only=trusted_only,
    )  # fmt: skip
    if name is not None:
        changes["name"] = name

    async def main() -> None:
        checked = _checked(resolved, changes)
        async with database(resolved) as engine:
            key = await update_key(engine, reference, checked, this_actor())
        show_facts(key_view(key), as_json=as_json)
        await notify_gateways(resolved)

    run_async(main)


def rotate(
    reference: ReferenceArgument,
    grace: Annotated[str, typer.Option(help="How long the old one stays valid: 24h, 30m, 7d or 0.")] = "24h",
    as_json: JsonOption = False,
    config: ConfigOption = None,
    data: DataOption = None,
) -> None:
    """Give an API key a new plaintext and print it. The old one stays valid for the grace period."""
    resolved = running_or_config(config, data)
    grace_s = duration_s(grace, "--grace")

    async def main() -> None:
        async with database(resolved) as engine:
            key, plaintext = await rotate_key(engine, reference, pepper_of(resolved), this_actor(), grace_s)
        _show_token(key, plaintext, as_json=as_json)
        if not as_json:
            until = zoned_time(key.previous_until_unix_ms)
            out.print(
                f"[dim]the old one is valid until {until}[/dim]" if until else "[dim]the old one is invalid now[/dim]"
            )
        await notify_gateways(resolved)

    run_async(main)


def list_(
    config: ConfigOption = None,
    data: DataOption = None,
    everything: Annotated[bool, typer.Option("--all", help="Include revoked keys.")] = False,
    team: Annotated[str | None, typer.Option("--team", "-t", help="Only of this team, by name or id.")] = None,
    as_json: JsonOption = False,
) -> None:
    """List API keys."""
    resolved = running_or_config(config, data)

    async def main() -> None:
        async with database(resolved) as engine:
            keys = await list_keys(engine, include_revoked=everything)
        keys = [key for key in keys if team is None or means(team, key.team_id, key.team_name)]
        if as_json:
            out.print_json(json.dumps([key_view(key) for key in keys]))
        else:
            columns = ("id", "name", "key", "team", "scopes", "limits", "created", "expires", "revoked")
            print_table(columns, (_cells(key) for key in keys))

    run_async(main)


def show(
    reference: ReferenceArgument, as_json: JsonOption = False, config: ConfigOption = None, data: DataOption = None
) -> None:
    """Show the details of an API key, without its plaintext, which is not stored."""
    resolved = running_or_config(config, data)

    async def main() -> None:
        async with database(resolved) as engine:
            key = await find_key(engine, reference)
        show_facts(key_view(key), as_json=as_json)

    run_async(main)


def revoke(
    reference: ReferenceArgument,
    stop_running: StopRunningOption = False,
    config: ConfigOption = None,
    data: DataOption = None,
) -> None:
    """Revoke an API key: running gateways refuse it immediately, or within half a minute if the queue server is down.

    Waiting requests end; running ones are completed, unless --stop-running is given. Where no gateway could be told,
    that is printed.
    """
    resolved = running_or_config(config, data)

    async def main() -> None:
        async with database(resolved) as engine:
            key = await revoke_key(engine, reference, this_actor(), stops_running=stop_running)
        out.print(f"revoked {key.key_id} ({key.name})", markup=False)
        await notify_gateways(resolved)

    run_async(main)


async def notify_gateways(config: Config) -> None:
    """Return once a running gateway has loaded the change; where none could be told, say so, and how long it will take.

    Raises nothing: the change is made, and its result must be printed.
    """
    reason = await _why_not_told(config)
    if reason:
        err.print(
            f"note: no running gateway could be told of this change: {reason}. Gateways that are running apply it "
            f"within {RELOAD_PERIOD_S:g} s.",
            style="yellow",
            markup=False,
            soft_wrap=True,
        )


async def _why_not_told(config: Config) -> str:
    """Tell the gateways; return why none of them has confirmed it, empty if one has."""
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
        return f"none has confirmed it within {NOTIFY_LIMIT_S:g} s"
    except BusError as error:
        return str(error)
    finally:
        await bus.close()
    return ""


def show_facts(view: dict[str, Any], *, as_json: bool) -> None:
    """Print an object as JSON, or its non-empty fields as lines."""
    if as_json:
        out.print_json(json.dumps(view))
        return
    table = Table.grid(padding=(0, 2, 0, 0))
    for field, value in view.items():
        if value is not None and field != "object":
            table.add_row(field.removesuffix("_unix_ms"), _fact(field, value))
    out.print(table)


def print_table(columns: Iterable[str], rows: Iterable[Iterable[str]]) -> None:
    """Print a table."""
    table = Table(*columns, box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for row in rows:
        table.add_row(*row)
    # A pipe has no width, and wrapping by a narrow terminal is better than truncation by rich.
    Console(width=max(out.width, TABLE_WIDTH_CHARS), highlight=False).print(table)


def _key_changes(
    config: Config, *, team: str | None, scope: list[str] | None, model: list[str] | None, expires: str | None
) -> dict[str, Any]:
    """Return the changes that a key's options name, except its policy."""
    changes: dict[str, Any] = {}
    if team is not None:
        changes["team"] = team
    if scope:
        changes["scopes"] = tuple(scope)
    if model:
        changes["models"] = None if model == ["all"] and "all" not in canonical_names(config.models) else model
    if expires is not None:
        changes["expires_unix_ms"] = expiry_unix_ms(expires)
    return changes


def _checked(config: Config, changes: dict[str, Any]) -> dict[str, Any]:
    return checked_grant(changes, canonical_names(config.models), unix_now_ms())


def _show_token(key: ApiKey, plaintext: str, *, as_json: bool) -> None:
    if as_json:
        out.print_json(json.dumps(key_view(key, plaintext)))
        return
    out.print(plaintext, markup=False, soft_wrap=True)
    out.print(f"[dim]{key.key_id}: save it now, it cannot be shown again[/dim]")
    if key.expires_unix_ms is not None:
        out.print(f"[dim]valid until {zoned_time(key.expires_unix_ms)}[/dim]", soft_wrap=True)


def _cells(key: ApiKey) -> tuple[str, ...]:
    times = (key.created_unix_ms, key.expires_unix_ms, key.revoked_unix_ms)
    scopes, limits = ", ".join(key.scopes), limits_text(key.policy)
    return (key.key_id, key.name, f"…{key.last_four}", key.team_name, scopes, limits, *map(local_time, times))


def _fact(field: str, value: object) -> str:
    if field.endswith("_unix_ms") and isinstance(value, int):
        return zoned_time(value)
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)
