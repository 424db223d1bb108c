"""How an upload comes in, as a form or as the body of a message batch, and who pays for it meanwhile.

slot of the tenant's share ──> a request of its key and team ──> chunks, at a least pace ──> storage ──> SQL
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Final

from starlette.requests import ClientDisconnect, Request

from db.accounts.principal import Principal
from db.engine import SQL_ERRORS
from gateway.batches.files import File, Part
from gateway.batches.services import BatchServices
from gateway.batches.storage.base import StorageError, Writer
from gateway.batches.upload_slots import Pace, Slot
from gateway.errors import BodyTooLarge, ClientDisconnected, RequestTooSlow, StorageUnavailable, too_many
from gateway.http.body import refuse_compressed
from gateway.http.pages import exchange_of
from gateway.settings import BatchSettings
from protocol.nats.clock import unix_now_ms

BATCH: Final = "batch"  # the purpose of an input file
COMPLETE_LIMIT_S: Final = 600.0  # from the last moment of an upload until SQL has its file


@dataclass(frozen=True, slots=True)
class Incoming:
    """An upload that may come."""

    chunks: AsyncIterator[bytes]
    slot: Slot
    room_bytes: int  # of the tenant, when it began
    max_bytes: int  # of its file


@asynccontextmanager
async def receiving(services: BatchServices, request: Request, principal: Principal) -> AsyncIterator[Incoming]:
    """Receive an upload, which counts as a request whatever becomes of it.

    Raises UnsupportedEncoding, Overloaded, RateLimitExceeded, LimitsUnavailable, and InsufficientQuota.
    """
    refuse_compressed(exchange_of(request).headers)
    settings = services.settings
    with services.uploads.hold(principal.tenant) as slot:
        async with services.counted(exchange_of(request), principal):
            room_bytes = await _room_bytes(services, principal)
            chunks = arriving(request.stream(), settings)
            yield Incoming(chunks, slot, room_bytes, min(settings.max_file_bytes, room_bytes))


async def _room_bytes(services: BatchServices, principal: Principal) -> int:
    """Return how much more a tenant may keep. Raises RateLimitExceeded where that is nothing."""
    settings = services.settings
    count, size = await services.files.usage(principal.tenant)
    if count >= settings.max_tenant_files or size >= settings.max_tenant_bytes:
        message = f"{count} files of {size} bytes are kept for this key or its team: delete some first."
        raise too_many(message, "file_quota_exceeded")
    return settings.max_tenant_bytes - size


async def arriving(body: AsyncIterator[bytes], settings: BatchSettings) -> AsyncIterator[bytes]:
    """Iterate over what comes. Raises ClientDisconnected, and RequestTooSlow for silence and for a trickle."""
    chunks, clock_s = aiter(body), asyncio.get_running_loop().time
    pace = Pace(settings.upload_min_bytes_per_s, settings.upload_pace_s)
    silence_s = settings.upload_silence_s
    while True:
        since_s = clock_s()
        try:
            async with asyncio.timeout(silence_s):
                chunk = await anext(chunks, None)
        except TimeoutError as error:
            raise RequestTooSlow(f"Nothing more of the upload has come for {silence_s:g} s.") from error
        except ClientDisconnect as error:
            raise ClientDisconnected from error
        if chunk is None:
            return
        pace.note(len(chunk), clock_s() - since_s)
        yield chunk


class _CountedWriter:
    """A writer whose bytes count as the tenant's before there is a file."""

    def __init__(self, writer: Writer, incoming: Incoming) -> None:
        self._writer = writer
        self._incoming = incoming

    async def write(self, data: bytes) -> None:
        """Append. Raises StorageError, and BodyTooLarge."""
        self._incoming.slot.count(len(data), self._incoming.room_bytes)
        await self._writer.write(data)


@asynccontextmanager
async def written(
    services: BatchServices, principal: Principal, file_id: str, incoming: Incoming
) -> AsyncIterator[Writer]:
    """Write an upload to the storage; if the block fails, there is none. Raises StorageUnavailable, RequestTooSlow."""
    limit_s, now_ms = services.settings.upload_s, unix_now_ms()
    file = File(file_id, principal.tenant, principal.key_id, now_ms, now_ms, BATCH, file_id, 0)
    await services.files.begin(file, now_ms + int(1000 * (limit_s + COMPLETE_LIMIT_S)))
    try:
        async with (
            _or_nothing(services, file_id),
            asyncio.timeout(limit_s),
            services.files.storage.writing(_only_part(file_id)) as writer,
        ):
            yield _CountedWriter(writer, incoming)
    except StorageError as error:
        raise StorageUnavailable from error
    except TimeoutError as error:
        raise RequestTooSlow(f"The upload did not end within {limit_s:g} s.") from error


async def add_input(
    services: BatchServices, principal: Principal, file_id: str, *, name: str, size_bytes: int, ttl_s: float
) -> File:
    """Let what was written be a file. Raises BodyTooLarge where others of its tenant have taken the room meanwhile."""
    now_ms = unix_now_ms()
    expires_ms = now_ms + int(ttl_s * 1000)
    file = File(file_id, principal.tenant, principal.key_id, now_ms, expires_ms, BATCH, name, size_bytes)
    async with _or_nothing(services, file_id):
        room_bytes = await _room_bytes(services, principal)
        if size_bytes > room_bytes:
            raise BodyTooLarge(f"The files of this key or its team may have {room_bytes} more bytes together.")
        if not await services.files.complete(file, [Part(file_id, 0, _only_part(file_id), size_bytes)]):
            raise RequestTooSlow(f"The file could not be completed within {COMPLETE_LIMIT_S:g} s.")
    return file


@asynccontextmanager
async def _or_nothing(services: BatchServices, file_id: str) -> AsyncIterator[None]:
    """Delete a file whose block fails; where that fails, too, or we die, it is swept once its time is over."""
    try:
        yield
    except BaseException:
        with suppress(*SQL_ERRORS, StorageError):
            await services.files.delete(file_id)
        raise


def _only_part(file_id: str) -> str:
    return f"{file_id}/0"
