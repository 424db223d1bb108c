"""``spillway queue``: back up and restore data that exists only in the queue."""

import shutil
from pathlib import Path
from typing import Annotated, Final

import msgspec
import typer

from protocol.errors import STREAM_NOT_FOUND, ApiError
from protocol.nats.backup import COPIED_STREAMS, BackupError, State, copies_in, copy_stream, restore_stream
from protocol.nats.bus import Bus
from spillway.cli.connections import queue_server
from spillway.cli.context import ResolvedConfig, command, out
from spillway.cli.output import JsonOption, print_table

COLUMNS: Final = ("stream", "messages", "KiB")


@command
async def backup(
    *,
    folder: Annotated[Path, typer.Argument(help="The folder to create, such as /backups/2026-11-27T2100.")],
    as_json: JsonOption = False,
    config: ResolvedConfig,
) -> None:
    """Copy stored responses, parked records, webhook events, unwritten usage, payloads and dead letters.

    You can run it while everything is running. Until the backup is complete, its folder is called FOLDER.partial.
    """
    partial = folder.with_name(f"{folder.name}.partial")
    states: dict[str, State] = {}
    try:
        if folder.exists():
            raise BackupError(f"{folder} already exists. Use a new folder for each backup")
        shutil.rmtree(partial, ignore_errors=True)  # left by a killed backup
        partial.mkdir(mode=0o700, parents=True)
        async with queue_server(config, "spillway queue backup") as bus:
            for stream in COPIED_STREAMS:
                (partial / stream).mkdir()
                states[stream] = await copy_stream(bus, stream, partial / stream)
        partial.rename(folder)
    except OSError as error:
        raise BackupError(f"{error.filename or folder}: {error.strerror}") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    _print(states, as_json=as_json)


@command
async def restore(
    *,
    folder: Annotated[Path, typer.Argument(help="The folder that `spillway queue backup` created.")],
    as_json: JsonOption = False,
    config: ResolvedConfig,
) -> None:
    """Restore a backup into an empty queue server. Run it before you start any gateway."""
    states: dict[str, State] = {}
    copies = copies_in(folder)
    try:
        async with queue_server(config, "spillway queue restore") as bus:
            for copy in copies:
                await _need_absence(bus, copy.name)
            for copy in copies:
                states[copy.name] = await restore_stream(bus, copy)
    except OSError as error:
        raise BackupError(f"{error.filename or folder}: {error.strerror}") from error
    _print(states, as_json=as_json)


async def _need_absence(bus: Bus, stream: str) -> None:
    try:
        await bus.api(f"STREAM.INFO.{stream}")
    except ApiError as error:
        if error.code == STREAM_NOT_FOUND:
            return
        raise
    raise BackupError(
        f"the queue server already has the stream {stream}. Stop the gateways and restore into an empty queue server"
    )


def _print(states: dict[str, State], *, as_json: bool) -> None:
    if as_json:
        out.print_json(data=[{"stream": name, **msgspec.structs.asdict(state)} for name, state in states.items()])
        return
    print_table(COLUMNS, [(name, str(state.messages), str(-(-state.bytes // 1024))) for name, state in states.items()])
