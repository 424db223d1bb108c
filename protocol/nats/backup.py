"""Copies of streams by JetStream snapshots: a folder per stream, laid out as by ``nats stream backup``.

    stream.tar.s2     the server's snapshot, not parsed here
    backup.json       the stream's configuration and state

Only file-based streams have snapshots. A stream is restored exactly, with its sequence numbers, timestamps and TTLs.
Consumers are not copied: unacknowledged messages are redelivered.
"""

import asyncio
import os
from pathlib import Path
from typing import Any, BinaryIO, Final

import msgspec
from msgspec import Struct
from nats.aio.msg import Msg

from protocol import subjects
from protocol.errors import ExpectedError
from protocol.nats.bus import Bus
from protocol.wire import UNDECODABLE

# Data that exists nowhere else. Jobs, prompts and claims are lost with their gateways anyway; workers republish
# heartbeats and models; limits restart from the ledger; a lease is useless without its owner.
COPIED_STREAMS: Final = (
    subjects.RESPONSES_STREAM,
    subjects.PARKED_STREAM,
    subjects.WEBHOOKS_STREAM,
    subjects.USAGE_STREAM,
    subjects.PAYLOADS_STREAM,
    subjects.DEAD_LETTER_STREAM,
)
DATA_NAME: Final = "stream.tar.s2"
META_NAME: Final = "backup.json"
CHUNK_BYTES: Final = 128 * 1024
WINDOW_BYTES: Final = 8 * CHUNK_BYTES  # sent by the server and not yet written
CHUNK_LIMIT_S: Final = 30.0
LOAD_LIMIT_S: Final = 3600.0  # for the server to load a stream that it has fully received


class BackupError(ExpectedError):
    """Raised when a stream could not be copied or restored; the message says why."""


class State(Struct, frozen=True):
    """The state of a stream."""

    messages: int
    bytes: int


class _Meta(Struct, frozen=True):
    config: dict[str, Any]
    state: dict[str, Any]


class _Answer(Struct, frozen=True):
    state: State | None = None
    error: dict[str, Any] | None = None


_meta_decoder = msgspec.json.Decoder(_Meta)
_answer_decoder = msgspec.json.Decoder(_Answer)


async def copy_stream(bus: Bus, stream: str, folder: Path) -> State:
    """Write a stream's snapshot into an empty folder. Raises BackupError, BusError and OSError."""
    reconnects = bus.client.stats["reconnects"]
    chunks: asyncio.Queue[Msg] = asyncio.Queue()  # bounded by WINDOW_BYTES: the server waits for acknowledgements
    inbox = bus.client.new_inbox()
    wanted = {"deliver_subject": inbox, "no_consumers": True, "chunk_size": CHUNK_BYTES, "window_size": WINDOW_BYTES}
    subscription = await bus.subscribe(inbox, chunks.put)
    try:
        answer = await bus.api(f"STREAM.SNAPSHOT.{stream}", wanted)
        with (folder / DATA_NAME).open("xb") as file:
            await _receive(bus, stream, chunks, file)
            _sync(file)
    finally:
        await subscription.unsubscribe()
    if bus.client.stats["reconnects"] != reconnects:
        raise BackupError(f"stream {stream}: the connection to the queue server was lost. Run the backup again")
    with (folder / META_NAME).open("xb") as file:
        file.write(msgspec.json.format(msgspec.json.encode(_Meta(answer["config"], answer["state"]))))
        _sync(file)
    return msgspec.convert(answer["state"], State)


async def _receive(bus: Bus, stream: str, chunks: asyncio.Queue[Msg], file: BinaryIO) -> None:
    while True:
        try:
            async with asyncio.timeout(CHUNK_LIMIT_S):
                chunk = await chunks.get()
        except TimeoutError:
            raise BackupError(f"stream {stream}: the queue server sent nothing for {CHUNK_LIMIT_S:g} s") from None
        if not chunk.data:
            headers = chunk.headers or {}
            if headers.get("Status", "204") != "204":
                raise BackupError(f"stream {stream}: the queue server ended the copy: {headers.get('Description')}")
            return
        file.write(chunk.data)
        if chunk.reply:  # the last chunk has none
            await bus.publish(chunk.reply, b"")


def _sync(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())


def copies_in(folder: Path) -> list[Path]:
    """Return the stream folders of a backup. Raises BackupError if it has none."""
    found = [folder / stream for stream in COPIED_STREAMS if (folder / stream / META_NAME).is_file()]
    if not found:
        raise BackupError(f"{folder} is not a backup of the queue: it has no {COPIED_STREAMS[0]}/{META_NAME}")
    return found


async def restore_stream(bus: Bus, folder: Path) -> State:
    """Create a stream from its copy. Raises BackupError, BusError and OSError.

    It has one replica. Gateways set the configured number when they start.
    """
    stream = folder.name
    try:
        meta = _meta_decoder.decode((folder / META_NAME).read_bytes())
    except UNDECODABLE as error:
        raise BackupError(f"{folder / META_NAME}: {error}") from error
    answer = await bus.api(f"STREAM.RESTORE.{stream}", {"config": {**meta.config, "num_replicas": 1}})
    subject = answer["deliver_subject"]
    with (folder / DATA_NAME).open("rb") as file:
        while chunk := file.read(CHUNK_BYTES):
            _check(stream, await bus.request(subject, chunk, timeout_s=CHUNK_LIMIT_S))
    state = _check(stream, await bus.request(subject, b"", timeout_s=LOAD_LIMIT_S))
    if state is None:
        raise BackupError(f"stream {stream}: the queue server did not report what it restored")
    return state


def _check(stream: str, reply: Msg) -> State | None:
    """Return the state in the reply to the last part. Raises BackupError."""
    try:
        answer = _answer_decoder.decode(reply.data) if reply.data else _Answer()
    except UNDECODABLE as error:
        raise BackupError(f"stream {stream}: the queue server's answer cannot be read: {error}") from error
    if answer.error is not None:
        raise BackupError(f"stream {stream}: {answer.error.get('description', 'the queue server refused it')}")
    return answer.state
