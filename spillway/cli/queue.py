"""``spillway queue``: a copy of what exists only in the queue, and its restoration."""

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
    folder: Annotated[Path, typer.Argument(help="Folder to create, such as /backups/2026-11-27T2100.")],
    as_json: JsonOption = False,
    config: ResolvedConfig,
) -> None:
    """Copy stored responses, parked records, webhook events, unwritten usage, payloads and dead letters.

    Everything may run meanwhile. The folder appears when the copy is complete; until then it is called FOLDER.partial.
    """
    partial = folder.with_name(f"{folder.name}.partial")
    states: dict[str, State] = {}
    try:
        if folder.exists():
            raise BackupError(f"{folder} exists already. Name another folder for each backup")
        shutil.rmtree(partial, ignore_errors=True)  # of one that was killed
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
    folder: Annotated[Path, typer.Argument(help="Folder that `spillway queue backup` has created.")],
    as_json: JsonOption = False,
    config: ResolvedConfig,
) -> None:
    """Create the streams of a backup in an empty queue server, before any gateway starts."""
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
        f"the queue server has a stream {stream} already. Stop the gateways, and restore into an empty queue server"
    )


def _print(states: dict[str, State], *, as_json: bool) -> None:
    if as_json:
        out.print_json(data=[{"stream": name, **msgspec.structs.asdict(state)} for name, state in states.items()])
        return
    print_table(COLUMNS, [(name, str(state.messages), str(-(-state.bytes // 1024))) for name, state in states.items()])
