"""Shared parts of all commands: options, the resolved configuration, and error messages."""

import contextlib
import json
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path
from typing import Annotated, Any, Final

import typer
import uvloop
from pydantic import SecretStr
from rich.console import Console
from sqlalchemy import make_url
from sqlalchemy.ext.asyncio import AsyncEngine

from accounts.errors import LoginError, PepperError, PrincipalError
from accounts.pepper import load_or_create_pepper
from db.engine import create_engine
from db.errors import SQL_ERRORS, DatabaseError, DatabaseUnavailable, describe
from fleet.errors import FleetError
from ledger.payloads.errors import PayloadError
from pool_worker.engines.base import EngineDiedError
from protocol.bus import Bus
from protocol.credentials import access_options
from protocol.errors import BusError
from spillway.children import ChildError
from spillway.config import DEFAULT_CONFIG_NAME, Config, ConfigError, config_without_file, default_config, load_config
from spillway.embedded_nats import EmbeddedNatsError
from spillway.nats_accounts import AuthorityError
from spillway.up import UpError, resolved_config_path

CONNECT_LIMIT_S: Final = 5.0  # short: the user is waiting for the command

out = Console(highlight=False)
err = Console(stderr=True, highlight=False)

ConfigOption = Annotated[
    Path | None,
    typer.Option(
        "--config", "-c", help=f"Configuration file. Default: ./{DEFAULT_CONFIG_NAME} if it exists, else the demo's."
    ),
]
DataOption = Annotated[Path | None, typer.Option("--data", "-d", help="Data folder (config key `data_dir`).")]
ReadyFileOption = Annotated[Path | None, typer.Option("--ready-file", hidden=True)]


def fail(message: str) -> typer.Exit:
    """Print an error and return the exception to raise."""
    err.print(f"error: {message}", style="red", markup=False, soft_wrap=True)
    return typer.Exit(1)


def resolve_config(
    path: Path | None,
    data: Path | None,
    overrides: dict[str, Any] | None = None,
    *,
    defaults: dict[str, Any] | None = None,
) -> Config:
    """Return the configuration of a command, or end the command with an error message if it is invalid.

    ``defaults`` apply to missing keys, and replace the demo's configuration where there is no file.
    """
    overrides = dict(overrides or {})
    if data is not None:
        overrides["data_dir"] = data
    try:
        if path is not None:
            return load_config(path, overrides=overrides, defaults=defaults)
        if Path(DEFAULT_CONFIG_NAME).is_file():
            return load_config(Path(DEFAULT_CONFIG_NAME), overrides=overrides, defaults=defaults)
        if defaults is not None:
            return config_without_file(defaults, overrides=overrides)
        return default_config(overrides=overrides)
    except ConfigError as error:
        raise fail(str(error)) from error


def running_or_config(path: Path | None, data: Path | None) -> Config:
    """Return the configuration that a running ``up`` has resolved (ports, URLs), else that of ``resolve_config``."""
    config = resolve_config(path, data)
    resolved = resolved_config_path(config.data_dir)
    return resolve_config(resolved, data) if path is None and resolved.exists() else config


EXPECTED_ERRORS: Final = (
    AuthorityError,
    BusError,
    ChildError,
    ConfigError,
    DatabaseError,
    EmbeddedNatsError,
    EngineDiedError,
    FleetError,
    LoginError,
    PayloadError,
    PepperError,
    PrincipalError,
    UpError,
)


def run_async(main: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Run a command's coroutine on uvloop; print errors that a user can fix on one line each, with exit code 1."""
    messages: list[str] = []
    try:
        uvloop.run(main())
    except* EXPECTED_ERRORS as group:
        messages = [str(error) for error in _leaves(group)]
    if messages:
        raise fail("\n".join(dict.fromkeys(messages)))


def _leaves(group: BaseExceptionGroup[BaseException]) -> list[BaseException]:
    leaves: list[BaseException] = []
    for error in group.exceptions:
        leaves.extend(_leaves(error) if isinstance(error, BaseExceptionGroup) else [error])
    return leaves


def _need_file(database_url: str) -> None:
    """SQLite would make an empty one, and then say of a table that it is not there."""
    url = make_url(database_url)
    if url.get_backend_name() == "sqlite" and url.database and not Path(url.database).exists():
        raise DatabaseUnavailable(_hinted(f"there is no {url.database}"))


def _hinted(why: str) -> str:
    return f"database.url: {why} (has `spillway db upgrade` been run?)"


@contextlib.asynccontextmanager
async def database(config: Config) -> AsyncIterator[AsyncEngine]:
    """Open the configured database, and close it afterwards. SQL's errors become DatabaseUnavailable with a hint."""
    _need_file(config.database_url)
    engine = create_engine(config.database_url)
    try:
        yield engine
    except DatabaseUnavailable as error:
        raise DatabaseUnavailable(_hinted(str(error))) from error
    except SQL_ERRORS as error:
        raise DatabaseUnavailable(_hinted(describe(error))) from error
    finally:
        await engine.dispose()


async def connect_admin(config: Config, name: str, limit_s: float) -> Bus:
    """Connect to the configured queue server as an operator's command. Raises BusError."""
    access = access_options(config.nats.credentials_of("admin"), config.nats.ca_file, "admin")
    return await Bus.connect(list(config.nats.urls), name=name, options=access, first_limit_s=limit_s)


@contextlib.asynccontextmanager
async def queue_server(config: Config, name: str) -> AsyncIterator[Bus]:
    """Connect to the configured queue server as ``name``, and disconnect afterwards. Raises BusError.

    Ends the command with an error message if none is configured.
    """
    if not config.nats.urls:
        raise fail("nats.urls: no queue server is configured, and no `spillway up` is running here")
    bus = await connect_admin(config, name, CONNECT_LIMIT_S)
    try:
        yield bus
    finally:
        await bus.close()


def write_ready(path: Path | None, facts: dict[str, Any]) -> None:
    """Notify the launcher that this process is ready, by a file that is written atomically."""
    if path is not None:
        draft = path.with_suffix(".draft")
        draft.write_text(json.dumps(facts))
        draft.replace(path)


def pepper_of(config: Config) -> SecretStr:
    """Return the secret that keys are hashed with: configured, or stored in the data folder."""
    return config.auth.pepper or load_or_create_pepper(config.data_dir)
