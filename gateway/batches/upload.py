"""Receives upload forms: fields into memory, the file into storage as a stream."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Final

from msgspec import Struct, field
from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header
from starlette.requests import ClientDisconnect, Request

from db.accounts.principal import Principal
from db.engine import SQL_ERRORS
from gateway.batches.files import File, Pace, Part, Slot
from gateway.batches.parts import BatchServices
from gateway.batches.storage.base import StorageError, Writer
from gateway.errors import (
    BodyTooLarge,
    ClientDisconnected,
    InvalidParameter,
    RequestTooSlow,
    StorageUnavailable,
    too_many,
)
from gateway.http.body import refuse_compressed
from gateway.http.pages import exchange_of
from gateway.settings import BatchSettings
from protocol.nats.clock import unix_now_ms

MAX_FIELD_BYTES: Final = 4096  # of a field, including its headers
MAX_FIELDS: Final = 16
MAX_FORM_BYTES: Final = 256 * 1024  # of everything except the file
MAX_NAME_CHARS: Final = 255
WRITE_BYTES: Final = 256 * 1024


class Upload(Struct):
    """The received part of an upload."""

    fields: dict[str, str] = field(default_factory=dict)
    filename: str | None = None  # None: no file received
    size_bytes: int = 0


class _Form:
    """Callbacks of the parser. They collect data for ``receive_upload``, which can await."""

    def __init__(self, upload: Upload, max_bytes: int) -> None:
        self.file = bytearray()  # received, not yet written
        self.ended = False
        self._upload = upload
        self._max_bytes = max_bytes
        self._name = ""
        self._is_file = False
        self._header, self._value, self._disposition, self._content = (bytearray() for _ in range(4))
        self._parts = 0

    def on_part_begin(self) -> None:
        self._parts += 1
        if self._parts > MAX_FIELDS:
            raise InvalidParameter(f"The form may have at most {MAX_FIELDS} fields.")
        self._disposition, self._content = bytearray(), bytearray()

    def on_header_field(self, data: bytes, start: int, end: int) -> None:
        self._add(self._header, data[start:end])

    def on_header_value(self, data: bytes, start: int, end: int) -> None:
        self._add(self._value, data[start:end])

    def on_header_end(self) -> None:
        if self._header.lower() == b"content-disposition":
            self._disposition = self._value
        self._header, self._value = bytearray(), bytearray()

    def on_headers_finished(self) -> None:
        _, options = parse_options_header(bytes(self._disposition))
        self._name = options.get(b"name", b"").decode("utf-8", "replace")
        filename = options.get(b"filename")
        self._is_file = filename is not None
        if filename is None:
            return
        if self._name != "file" or self._upload.filename is not None:
            raise InvalidParameter("The form must have one file, in the field 'file'.", param=self._name or "file")
        self._upload.filename = filename.decode("utf-8", "replace")[-MAX_NAME_CHARS:].replace("\0", "")

    def on_part_data(self, data: bytes, start: int, end: int) -> None:
        if not self._is_file:
            self._add(self._content, data[start:end])
            return
        self._upload.size_bytes += end - start
        if self._upload.size_bytes > self._max_bytes:
            raise BodyTooLarge(f"A file may have at most {self._max_bytes} bytes.")
        self.file += data[start:end]

    def on_part_end(self) -> None:
        if not self._is_file:
            self._upload.fields[self._name] = self._content.decode("utf-8", "replace")

    def on_end(self) -> None:
        self.ended = True

    def _add(self, what: bytearray, data: bytes) -> None:
        if len(what) + len(data) > MAX_FIELD_BYTES:
            raise InvalidParameter(f"A field of the form may have at most {MAX_FIELD_BYTES} bytes.", param=self._name)
        what += data


async def receive_upload(body: AsyncIterator[bytes], content_type: str, writer: Writer, *, max_bytes: int) -> Upload:
    """Read a form, and write its file while it arrives.

    Raises InvalidParameter, BodyTooLarge, and the errors of ``body`` and ``writer``.
    """
    upload = Upload()
    form = _Form(upload, max_bytes)
    parser = _parser(content_type, form)
    size_bytes, has_begun = 0, False
    async for chunk in body:
        size_bytes += len(chunk)
        if (
            size_bytes > max_bytes + MAX_FORM_BYTES
        ):  # also counts bytes before the first field, between headers, and after the end
            raise BodyTooLarge(f"A form may have at most {MAX_FORM_BYTES} bytes in addition to its file.")
        if not has_begun:  # otherwise the parser skips data after a line end in the same chunk
            chunk = chunk.lstrip(b"\r\n")  # noqa: PLW2901
            has_begun = bool(chunk)
        try:
            parser.write(chunk)
        except FormParserError as error:
            raise _unreadable(error) from error
        if len(form.file) >= WRITE_BYTES:
            await _write(writer, form)
    if not form.ended:
        raise InvalidParameter("The form ends too early.")
    await _write(writer, form)
    return upload


def _parser(content_type: str, form: _Form) -> MultipartParser:
    kind, options = parse_options_header(content_type)
    boundary = options.get(b"boundary")
    if kind != b"multipart/form-data" or not boundary:
        raise InvalidParameter("Send the file as multipart/form-data, with the fields 'file' and 'purpose'.")
    callbacks = {name: getattr(form, name) for name in dir(form) if name.startswith("on_")}
    try:
        return MultipartParser(boundary, callbacks)  # type: ignore[arg-type]  # a TypedDict of these names
    except FormParserError as error:  # the boundary is too long
        raise _unreadable(error) from error


def _unreadable(error: FormParserError) -> InvalidParameter:
    return InvalidParameter(f"The form cannot be read: {error}")


async def _write(writer: Writer, form: _Form) -> None:
    data, form.file = bytes(form.file), bytearray()
    if data:
        await writer.write(data)


# --- receiving --------------------------------------------------------------------------------------------------------
#
# Receiving uploads (forms and bodies of message batches), and accounting for them.
#
# slot of the tenant ──> request of its key and team ──> chunks at a minimum speed ──> storage ──> SQL

BATCH: Final = "batch"  # purpose of an input file
COMPLETE_LIMIT_S: Final = 600.0  # from the end of an upload until the file is in SQL


@dataclass(frozen=True, slots=True)
class Incoming:
    """An accepted upload."""

    chunks: AsyncIterator[bytes]
    slot: Slot
    room_bytes: int  # free storage of the tenant at the start
    max_bytes: int  # maximum size of the file


@asynccontextmanager
async def receiving(services: BatchServices, request: Request, principal: Principal) -> AsyncIterator[Incoming]:
    """Receive an upload. It counts as a request, also if it fails.

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
    """Return the free storage of a tenant. Raises RateLimitExceeded if there is none."""
    settings = services.settings
    count, size = await services.files.usage(principal.tenant)
    if count >= settings.max_tenant_files or size >= settings.max_tenant_bytes:
        message = (
            f"{count} files with {size} bytes in total are stored for this API key or its team. Delete some first."
        )
        raise too_many(message, "file_quota_exceeded")
    return settings.max_tenant_bytes - size


async def arriving(body: AsyncIterator[bytes], settings: BatchSettings) -> AsyncIterator[bytes]:
    """Iterate over the received chunks. Raises ClientDisconnected, and RequestTooSlow below the minimum speed."""
    chunks, clock_s = aiter(body), asyncio.get_running_loop().time
    pace = Pace(settings.upload_min_bytes_per_s, settings.upload_pace_s)
    silence_s = settings.upload_silence_s
    while True:
        since_s = clock_s()
        try:
            async with asyncio.timeout(silence_s):
                chunk = await anext(chunks, None)
        except TimeoutError as error:
            raise RequestTooSlow(f"No data of the upload was received for {silence_s:g} s.") from error
        except ClientDisconnect as error:
            raise ClientDisconnected from error
        if chunk is None:
            return
        pace.note(len(chunk), clock_s() - since_s)
        yield chunk


class _CountedWriter:
    """A writer that counts bytes against the tenant's storage before the file exists."""

    def __init__(self, writer: Writer, incoming: Incoming) -> None:
        self._writer = writer
        self._incoming = incoming

    async def write(self, data: bytes) -> None:
        """Append. Raises StorageError and BodyTooLarge."""
        self._incoming.slot.count(len(data), self._incoming.room_bytes)
        await self._writer.write(data)


@asynccontextmanager
async def written(
    services: BatchServices, principal: Principal, file_id: str, incoming: Incoming
) -> AsyncIterator[Writer]:
    """Write an upload to storage; delete it if the block fails. Raises StorageUnavailable and RequestTooSlow."""
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
        raise RequestTooSlow(f"The upload was not complete within {limit_s:g} s.") from error


async def add_input(
    services: BatchServices, principal: Principal, file_id: str, *, name: str, size_bytes: int, ttl_s: float
) -> File:
    """Create the file of an upload. Raises BodyTooLarge if the tenant's storage has filled up since its start."""
    now_ms = unix_now_ms()
    expires_ms = now_ms + int(ttl_s * 1000)
    file = File(file_id, principal.tenant, principal.key_id, now_ms, expires_ms, BATCH, name, size_bytes)
    async with _or_nothing(services, file_id):
        room_bytes = await _room_bytes(services, principal)
        if size_bytes > room_bytes:
            raise BodyTooLarge(f"The files of this API key or its team may have {room_bytes} more bytes in total.")
        if not await services.files.complete(file, [Part(file_id, 0, _only_part(file_id), size_bytes)]):
            raise RequestTooSlow(f"The file could not be stored within {COMPLETE_LIMIT_S:g} s.")
    return file


@asynccontextmanager
async def _or_nothing(services: BatchServices, file_id: str) -> AsyncIterator[None]:
    """Delete the file if the block fails. If that fails too, ``sweep`` deletes it after its expiry."""
    try:
        yield
    except BaseException:
        with suppress(*SQL_ERRORS, StorageError):
            await services.files.delete(file_id)
        raise


def _only_part(file_id: str) -> str:
    return f"{file_id}/0"
