"""``spillway config``: check the configuration file, and show the values in effect."""

import json
import os
from pathlib import Path
from typing import Annotated

import typer

from db.url import advice_of
from spillway.cli.context import ConfigOption, DataOption, fail, out, resolve_config
from spillway.cli.output import JsonOption
from spillway.config import DEFAULT_CONFIG_NAME, Config, read_file
from spillway.config_origins import DEFAULT, values_of
from spillway.otel_variables import why_unusable


def check(
    context: typer.Context,
    path: Annotated[Path | None, typer.Argument(help="Same as --config.")] = None,
    as_json: JsonOption = False,
    config: ConfigOption = None,
    data: DataOption = None,
) -> None:
    """Validate the configuration file and the environment together, and report every invalid key."""
    source = context.get_parameter_source("config")
    if (
        path is not None
        and config is not None
        and path != config
        and source is not None
        and source.name == "COMMANDLINE"
    ):
        raise fail(f"two configuration files: {path} and --config {config}. Name only one")
    named = path or config
    resolved = resolve_config(named, data)
    notes = _notes(resolved)
    if named is None and not Path(DEFAULT_CONFIG_NAME).is_file():
        notes.insert(0, f"no {DEFAULT_CONFIG_NAME} in this folder: checked the demo's configuration")
    if as_json:
        out.print_json(data={"models": list(resolved.models), "pools": list(resolved.pools), "notes": notes})
        return
    out.print(f"ok: {len(resolved.models)} model(s), {len(resolved.pools)} pool(s)")
    for note in notes:
        out.print(f"note: {note}", style="yellow", markup=False, soft_wrap=True)


def show(
    changed: Annotated[bool, typer.Option("--changed", help="Omit defaults.")] = False,
    as_json: JsonOption = False,
    config: ConfigOption = None,
    data: DataOption = None,
) -> None:
    """Show every value of the configuration and where it comes from. Secrets are masked.

    A value comes from an environment variable, the file, --data, or "default".
    """
    resolved = resolve_config(config, data)
    path = config or Path(DEFAULT_CONFIG_NAME)
    given = read_file(path) if path.is_file() else {}
    values = [
        value._replace(origin="--data") if value.key == "data_dir" and data is not None else value
        for value in values_of(resolved, given, str(path), os.environ)
    ]
    if changed:
        values = [value for value in values if value.origin != DEFAULT]
    if as_json:
        out.print_json(data=[value._asdict() for value in values])
        return
    for value in values:
        text = json.dumps(value.value, ensure_ascii=False)
        out.print(f"{value.key} = {text}  # {value.origin}", markup=False, soft_wrap=True)


def _notes(config: Config) -> list[str]:
    """Return warnings about valid settings that are probably mistakes."""
    notes = [
        f"models.{name}: no pool serves this model"
        for name in config.models
        if not any(name in pool.models for pool in config.pools.values())
    ]
    notes += [
        f"pools.{name} is trusted, but without nats.credentials any worker can take its jobs"
        for name, pool in config.pools.items()
        if pool.trusted and not config.nats.credentials
    ]
    if advice := advice_of(config.database_url):
        notes.append(f"database.url: {advice}")
    if config.telemetry.otlp_endpoint is None and (reason := why_unusable(os.environ)):
        notes.append(reason)
    return notes
