"""``spillway keys``: who may call the gateway."""

import logging
from datetime import UTC, datetime
from typing import Annotated, Final

import typer
from rich.table import Table

from gateway.auth.keys import ApiKey, create_key, list_keys, revoke_key
from protocol import subjects
from protocol.bus import Bus
from protocol.errors import BusError
from spillway.cli.context import ConfigOption, DataOption, database, out, pepper_of, run_async, running_or_config
from spillway.config import Config

NOTIFY_LIMIT_S: Final = 3.0

log = logging.getLogger(__name__)


def create(
    name: Annotated[str, typer.Argument(help="What the key is for; unique among the active keys.")],
    config: ConfigOption = None,
    data: DataOption = None,
) -> None:
    """Create an API key and print it. It is stored as a hash only: this is the one time it can be seen."""
    resolved = running_or_config(config, data)

    async def main() -> None:
        async with database(resolved) as engine:
            key, plaintext = await create_key(engine, name, pepper_of(resolved))
        await _tell_gateways(resolved)
        out.print(plaintext, markup=False, soft_wrap=True)
        out.print(f"[dim]{key.key_id}: keep it now, it cannot be shown again[/dim]")

    run_async(main)


def list_(
    config: ConfigOption = None,
    data: DataOption = None,
    everything: Annotated[bool, typer.Option("--all", help="Revoked keys too.")] = False,
) -> None:
    """List API keys."""
    resolved = running_or_config(config, data)

    async def main() -> None:
        async with database(resolved) as engine:
            keys = await list_keys(engine, include_revoked=everything)
        table = Table("id", "name", "key", "created", "revoked")
        for key in keys:
            table.add_row(*_cells(key))
        out.print(table)

    run_async(main)


def revoke(
    reference: Annotated[str, typer.Argument(help="The key's id, a unique beginning of it, or its name.")],
    config: ConfigOption = None,
    data: DataOption = None,
) -> None:
    """Revoke an API key: running gateways refuse it at once, or within half a minute if they cannot be told."""
    resolved = running_or_config(config, data)

    async def main() -> None:
        async with database(resolved) as engine:
            key = await revoke_key(engine, reference)
        await _tell_gateways(resolved)
        out.print(f"revoked {key.key_id} ({key.name})", markup=False)

    run_async(main)


def _cells(key: ApiKey) -> tuple[str, ...]:
    revoked = "" if key.revoked_unix_ms is None else _time(key.revoked_unix_ms)
    return key.key_id, key.name, f"sk-sw-…{key.last_four}", _time(key.created_unix_ms), revoked


def _time(unix_ms: int) -> str:
    return f"{datetime.fromtimestamp(unix_ms / 1000, UTC).astimezone():%Y-%m-%d %H:%M}"


async def _tell_gateways(config: Config) -> None:
    """Have running gateways load the keys now; without it they do so within half a minute."""
    if not config.nats.urls:
        return
    try:
        bus = await Bus.connect(list(config.nats.urls), name="spillway keys", first_limit_s=NOTIFY_LIMIT_S)
        await bus.publish(subjects.KEYS_CHANGED_SUBJECT, b"")
        await bus.close()
    except BusError as error:
        log.warning("gateways will see the change within half a minute: %s", error)
