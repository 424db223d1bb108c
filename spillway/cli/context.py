"""Shared parts of all commands: options, the resolved configuration, and error messages."""

import json
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Annotated, Any

import typer
import uvloop
from pydantic import SecretStr
from rich.console import Console

from accounts.pepper import load_or_create_pepper
from protocol.errors import ExpectedError
from spillway.children import resolved_config_path
from spillway.config import (
    DEFAULT_CONFIG_NAME,
    Config,
    ConfigError,
    config_without_file,
    default_config,
    load_config,
)

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
    try:
        is_running = resolved.exists()
    except PermissionError as error:
        raise fail(
            f"the data folder {config.data_dir} belongs to another user: run this command as that user"
        ) from error
    return resolve_config(resolved, data) if path is None and is_running else config


def run_async(main: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Run a command's coroutine on uvloop; print expected errors on one line each, with exit code 1."""
    messages: list[str] = []
    try:
        uvloop.run(main())
    except* ExpectedError as group:
        messages = [str(error) for error in _leaves(group)]
    if messages:
        raise fail("\n".join(dict.fromkeys(messages)))


def _leaves(group: BaseExceptionGroup[BaseException]) -> list[BaseException]:
    leaves: list[BaseException] = []
    for error in group.exceptions:
        leaves.extend(_leaves(error) if isinstance(error, BaseExceptionGroup) else [error])
    return leaves


def write_ready(path: Path | None, facts: dict[str, Any]) -> None:
    """Notify the launcher that this process is ready, by a file that is written atomically."""
    if path is not None:
        draft = path.with_suffix(".draft")
        draft.write_text(json.dumps(facts))
        draft.replace(path)


def pepper_of(config: Config) -> SecretStr:
    """Return the secret that keys are hashed with: configured, or stored in the data folder."""
    return config.auth.pepper or load_or_create_pepper(config.data_dir)
