"""Reading an upload's form: its fields into memory, its file into the storage as it comes."""

from collections.abc import AsyncIterator
from typing import Final

from msgspec import Struct, field
from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header

from gateway.batches.storage.base import Writer
from gateway.errors import BodyTooLarge, InvalidParameter

MAX_FIELD_BYTES: Final = 4096  # of one field, its headers and all
MAX_FIELDS: Final = 16
MAX_FORM_BYTES: Final = 256 * 1024  # of all that is not the file
MAX_NAME_CHARS: Final = 255
WRITE_BYTES: Final = 256 * 1024


class Upload(Struct):
    """What has come so far."""

    fields: dict[str, str] = field(default_factory=dict)
    filename: str | None = None  # None: no file has come
    size_bytes: int = 0


class _Form:
    """The parser's callbacks; what they find is taken by whoever can wait."""

    def __init__(self, upload: Upload, max_bytes: int) -> None:
        self.file = bytearray()  # that is not written yet
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
    """Read a form to its end, and write its file as it comes.

    Raises InvalidParameter, BodyTooLarge, and what ``body`` and ``writer`` raise.
    """
    upload = Upload()
    form = _Form(upload, max_bytes)
    parser = _parser(content_type, form)
    size_bytes, has_begun = 0, False
    async for chunk in body:
        size_bytes += len(chunk)
        if size_bytes > max_bytes + MAX_FORM_BYTES:  # before the first field, between two headers, or after the end
            raise BodyTooLarge(f"A form may have at most {MAX_FORM_BYTES} bytes beside its file.")
        if not has_begun:  # the parser would skip what follows a line's end, as far as it is in the same chunk
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
    except FormParserError as error:  # of a boundary that is too long
        raise _unreadable(error) from error


def _unreadable(error: FormParserError) -> InvalidParameter:
    return InvalidParameter(f"The form cannot be read: {error}")


async def _write(writer: Writer, form: _Form) -> None:
    data, form.file = bytes(form.file), bytearray()
    if data:
        await writer.write(data)
