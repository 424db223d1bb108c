"""Shared parts of all commands: options, the resolved configuration, and error messages."""

import functools
import inspect
import json
import logging
import os
import pwd
from collections.abc import Callable, Coroutine, Mapping
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any, Final, NamedTuple, get_args

import typer
import uvloop
from pydantic import SecretStr
from rich.console import Console

from db.accounts.masking import masked
from db.accounts.token import load_or_create_pepper
from protocol.errors import ExpectedError
from spillway import logs
from spillway.children import resolved_config_path, run_dir_of
from spillway.config import (
    DEFAULT_CONFIG_NAME,
    Config,
    ConfigError,
    config_without_file,
    default_config,
    load_config,
)

log = logging.getLogger(__name__)
CONFIG_VARIABLE: Final = "SPILLWAY_CONFIG"
out = Console(highlight=False)
err = Console(stderr=True, highlight=False)

ConfigOption = Annotated[
    Path | None,
    typer.Option(
        "--config",
        "-c",
        envvar=CONFIG_VARIABLE,
        help=f"Configuration file. Default: ./{DEFAULT_CONFIG_NAME} if it exists, else the demo's configuration.",
    ),
]
DataOption = Annotated[Path | None, typer.Option("--data", "-d", help="Data folder (config key `data_dir`).")]
ReadyFileOption = Annotated[Path | None, typer.Option("--ready-file", hidden=True)]


def fail(message: str) -> typer.Exit:
    """Print an error, or log it if this process logs JSON; return the exception to raise."""
    if logs.is_json():
        log.error("%s", message)
    else:
        err.print(f"error: {masked(message)}", style="red", markup=False, soft_wrap=True)
    return typer.Exit(1)


def resolve_config(
    path: Path | None,
    data: Path | None,
    overrides: dict[str, Any] | None = None,
    *,
    defaults: dict[str, Any] | None = None,
) -> Config:
    """Return the configuration of a command; end the command with an error message if it is invalid.

    ``defaults`` apply to missing keys. Without a file, they replace the demo's configuration.
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


def running_or_config(config: Path | None, data: Path | None) -> Config:
    """Return a command's configuration, completed from the `spillway up` that runs in its data folder.

    Without ``config``, return the configuration of the running system. With ``config``, the file takes precedence; the
    running system supplies only a missing queue server and a missing pepper.
    """
    found = resolve_config(config, data)
    if config is not None and data is None:
        found = _where_it_runs(found, config)
    resolved = resolved_config_path(found.data_dir)
    if not _exists(resolved):
        return found
    running = resolve_config(resolved, data)
    if config is None:
        return running
    if running.database_url != found.database_url:  # a different installation
        return found
    auth = found.auth.model_copy(update={"pepper": found.auth.pepper or running.auth.pepper})
    return found.model_copy(update={"auth": auth, "nats": found.nats if found.nats.urls else running.nats})


def with_running_queue(config: Config) -> Config:
    """Return ``config`` with the queue server of the `up` that runs in its data folder, if it names no other."""
    resolved = resolved_config_path(config.data_dir)
    if config.nats.urls or not _exists(resolved):
        return config
    return config.model_copy(update={"nats": resolve_config(resolved, None).nats})


def _where_it_runs(config: Config, path: Path) -> Config:
    """Return ``config`` with the data folder next to its file, if one is in use there and none in this folder.

    A relative ``data_dir`` is relative to the folder in which `spillway up` was started, usually the file's folder.
    """
    beside = path.parent / config.data_dir
    if config.data_dir.is_absolute() or _exists(run_dir_of(config.data_dir)) or not _exists(run_dir_of(beside)):
        return config
    return config.model_copy(update={"data_dir": beside})


def _exists(path: Path) -> bool:
    """Return whether a path in a data folder exists; end the command if the folder belongs to another user."""
    try:
        return path.exists()
    except PermissionError as error:
        raise fail(
            f"the data folder {path.parent.parent} belongs to another user. Run this command as that user"
        ) from error


def run_async(main: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Run a command's coroutine on uvloop. Print each expected error on one line, with exit code 1."""
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


class Options(NamedTuple):
    """Several options that are combined into one parameter of a command."""

    annotations: Mapping[str, Any]  # by parameter name, from which Typer derives the option's name; all optional
    read: Callable[..., Any]  # takes all of them by name; None for an option that is not given


ResolvedConfig = Annotated[
    Config,
    Options({"config": ConfigOption, "data": DataOption}, running_or_config),
]


def command(function: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Turn a coroutine function into a command. A parameter annotated with ``Options`` becomes these options."""
    signature = inspect.signature(function)
    combined: dict[str, Options] = {}
    parameters: list[inspect.Parameter] = []
    for parameter in signature.parameters.values():
        options = next((one for one in get_args(parameter.annotation) if isinstance(one, Options)), None)
        if options is None:
            parameters.append(parameter.replace(kind=parameter.KEYWORD_ONLY))
            continue
        combined[parameter.name] = options
        parameters += [
            inspect.Parameter(name, parameter.KEYWORD_ONLY, default=None, annotation=annotation)
            for name, annotation in options.annotations.items()
        ]

    @functools.wraps(function)
    def run(**given: Any) -> None:  # noqa: ANN401  # of the types in the signature
        # Collect before storing: a parameter may have the same name as an option.
        values = {
            parameter: options.read(**{name: given.pop(name) for name in options.annotations})
            for parameter, options in combined.items()
        }
        run_async(lambda: function(**given, **values))

    run.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]  # what Typer reads
    return run


def unix_ms_of(moment: datetime | None) -> int | None:
    """Return a local time as Unix milliseconds."""
    return None if moment is None else int(moment.astimezone().timestamp() * 1000)


def this_actor() -> str:
    """Return the user of this command as an actor of the audit log."""
    try:
        return f"cli:{pwd.getpwuid(os.getuid()).pw_name}"
    except KeyError:
        return f"cli:{os.getuid()}"


def write_ready(path: Path | None, facts: dict[str, Any] | None) -> None:
    """Write a file atomically that tells the launcher that this process is ready. ``facts=None`` removes the file.

    A failure, for example because the disk is full, is only logged.
    """
    if path is None:
        return
    draft = path.with_suffix(".draft")
    try:
        if facts is None:
            path.unlink(missing_ok=True)
        else:
            draft.write_text(json.dumps(facts))
            draft.replace(path)
    except OSError as error:
        log.error("cannot write the ready file %s: %s", path, error.strerror)  # noqa: TRY400


def pepper_of(config: Config) -> SecretStr:
    """Return the pepper: the configured one, or the one stored in the data folder."""
    return config.auth.pepper or load_or_create_pepper(config.data_dir)
