"""``/v1/messages/batches``: Anthropic's Message Batches API."""

import hashlib
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Generator, Iterator, Sequence
from datetime import UTC, datetime
from functools import partial
from itertools import takewhile
from typing import Annotated, Any, Final, TypeVar

import msgspec
from fastapi import APIRouter, Query, Request, Response
from fastapi.responses import StreamingResponse
from msgspec import Raw, Struct
from pydantic import BaseModel, ConfigDict, Field

from db.accounts.principal import Principal
from gateway.api.values import MAX_BODY_VALUES, check_values
from gateway.batches.files import FileGone, Order, new_id
from gateway.batches.lines import MAX_DEPTH, is_deeper
from gateway.batches.openai_routes import batch_of, refuse_if_too_many
from gateway.batches.parts import BatchServices
from gateway.batches.results import results_of
from gateway.batches.storage.base import StorageError
from gateway.batches.store import ANTHROPIC, OVER, Batch, Status
from gateway.batches.upload import Incoming, add_input, receiving, written
from gateway.errors import BodyTooLarge, InvalidParameter, MalformedJson, StorageUnavailable, UnknownObject
from gateway.http.pages import exchange_of, json_answer, resumed
from gateway.settings import BatchSettings
from protocol.nats.clock import unix_now_ms
from protocol.wire import UNDECODABLE

# --- message requests -------------------------------------------------------------------------------------------------
#
# The body of POST /v1/messages/batches, parsed as a stream: each request becomes a line for /v1/messages.
#
# chunks ──> pieces ──> a thread: JSON values ──> requests ──> lines

ENDPOINT: Final = "/v1/messages"
MAX_MODEL_CHARS: Final = 512
MAX_NESTING: Final = MAX_DEPTH + 2  # maximum nesting: a request, its parameters, and one empty value
ID_BYTES: Final = 16  # of the hash of a custom_id
PIECE_BYTES: Final = 256 * 1024  # parsed by a thread at a time
LINE: Final = b'{"custom_id":"%b","method":"POST","url":"/v1/messages","body":%b}\n'
_CUSTOM_ID: Final = re.compile(r"[a-zA-Z0-9_-]{1,64}")
_SPACE: Final = re.compile(rb"[ \t\r\n]*+")
_SCALAR: Final = re.compile(rb'[^"\[\]{}:, \t\r\n]*+')
_BETWEEN_MARKS: Final = re.compile(rb'[^"\[\]{}]*+')
_IN_STRING: Final = re.compile(rb'(?:[^"\\]++|\\.)*+', re.DOTALL)

InThread = Callable[[int, Callable[[], list[bytes]]], Awaitable[list[bytes]]]  # size in bytes, and the work
_Decoded = TypeVar("_Decoded")


class _Request(Struct, frozen=True):
    """A request with unparsed parameters."""

    custom_id: Any = None
    params: Raw = Raw(b"null")


_decode_key: Final = msgspec.json.Decoder(str).decode
_decode_request: Final = msgspec.json.Decoder(_Request).decode
_decode_any: Final = msgspec.json.Decoder().decode
_skip: Final = msgspec.json.Decoder(Raw).decode


class _Scan:
    """Finds the end of a JSON value that arrives in pieces. It does not validate the value."""

    def __init__(self, what: str) -> None:
        self.size = 0  # bytes scanned so far
        self.is_over = False
        self._what = what
        self._in_string = False
        self._depth = 0
        self._opened = 0  # number of lists and objects

    @property
    def may_end(self) -> bool:
        """Return whether the value is complete if the text ends here, like a number."""
        return not self._in_string and not self._depth

    def read(self, text: bytes, start: int) -> None:
        """Continue scanning a text whose value begins at ``start``. Raises InvalidParameter."""
        at = start + self.size
        while at < len(text) and not self.is_over:
            if self._in_string:
                at = _end_of(_IN_STRING, text, at)
                if text[at : at + 1] != b'"':  # the string continues, possibly inside an escape
                    break
                at += 1
                self._in_string, self.is_over = False, not self._depth
                continue
            at = _end_of(_BETWEEN_MARKS if self._depth else _SCALAR, text, at)
            mark = text[at : at + 1]
            if not mark:
                break
            if not self._depth and (at > start or mark not in b'"[{'):  # after a number, or not a value
                self.is_over = True
                break
            at += 1
            self._take(mark)
        self.size = at - start

    def _take(self, mark: bytes) -> None:
        if mark == b'"':
            self._in_string = True
        elif mark in b"[{":
            self._depth += 1
            self._opened += 1
            if self._depth > MAX_NESTING:
                raise _malformed(f"{self._what} is nested too deeply.")
            if self._opened > MAX_BODY_VALUES:
                message = f"'{self._what}' has more than {MAX_BODY_VALUES} lists and objects."
                raise InvalidParameter(message, param=self._what, code="too_many_values")
        else:
            self._depth -= 1
            self.is_over = not self._depth


class _Text:
    """A JSON text that arrives in pieces. Methods raise MalformedJson.

    Each generator yields when it needs more text from ``add``, and returns its result. No byte is scanned twice,
    however the text is split.
    """

    def __init__(self, max_value_bytes: int) -> None:
        self._max_bytes = max_value_bytes
        self._text = b""
        self._at = 0
        self._ended = False

    def add(self, piece: bytes, *, is_last: bool) -> None:
        self._text, self._at, self._ended = self._text[self._at :] + piece, 0, is_last

    def next(self) -> Generator[None, None, bytes]:
        """Return the next non-space byte without consuming it; empty at the end."""
        while True:
            self._at = _end_of(_SPACE, self._text, self._at)
            if self._at < len(self._text):
                return self._text[self._at : self._at + 1]
            if self._ended:
                return b""
            yield

    def take(self, wanted: bytes) -> Generator[None, None, None]:
        """Consume the next byte, which must be one of ``wanted``."""
        found = yield from self.next()
        if not found or found not in wanted:
            expected = " or ".join(repr(chr(one)) for one in wanted)
            where = f"before {found.decode('latin-1')!r}" if found else "at the end"
            raise _malformed(f"expected {expected} {where}.")
        self._at += 1

    def value(self, what: str) -> Generator[None, None, bytes]:
        """Consume a value, unparsed. ``what`` names it. Also raises InvalidParameter if it is too large."""
        if not (yield from self.next()):
            raise _malformed(f"{what} is missing at the end.")
        scan = _Scan(what)
        while True:
            scan.read(self._text, self._at)
            if scan.size > self._max_bytes:
                message = f"'{what}' may have at most {self._max_bytes} bytes."
                raise InvalidParameter(message, param=what, code="too_large")
            if scan.is_over or (self._ended and scan.may_end):
                break
            if self._ended:
                raise _malformed(f"{what} ends too early.")
            yield
        raw = self._text[self._at : self._at + scan.size]
        self._at += scan.size
        check_values(raw, param=what)
        return raw


class _Requests:
    """Converts the requests of a body in pieces to lines. CPU-bound: use it in a thread."""

    def __init__(self, settings: BatchSettings) -> None:
        self._settings = settings
        self._text = _Text(settings.max_line_bytes)
        self._lines = self._all()

    def feed(self, piece: bytes, *, is_last: bool) -> list[bytes]:
        """Return the lines that are complete.

        Raises MalformedJson, and InvalidParameter with the index of the request.
        """
        self._text.add(piece, is_last=is_last)
        return list(takewhile(bool, self._lines))

    def _all(self) -> Iterator[bytes]:
        """Iterate over all lines; an empty one means that more text is needed."""
        settings, identities = self._settings, set[bytes]()
        for raw in self._elements():
            if raw is None:
                yield b""
                continue
            name = f"requests.{len(identities)}"
            if len(identities) >= settings.max_message_batch_requests:
                message = f"A batch may have at most {settings.max_message_batch_requests} requests."
                raise InvalidParameter(message, param="requests", code="too_large")
            custom_id, line = _line(raw, name)
            if len(line) > settings.max_line_bytes:
                message = f"'{name}' may have at most {settings.max_line_bytes} bytes as a line of a batch."
                raise InvalidParameter(message, param=name, code="too_large")
            identity = hashlib.blake2b(custom_id.encode(), digest_size=ID_BYTES).digest()
            if identity in identities:
                message = f"'{name}.custom_id' must be unique: '{custom_id}' is used more than once."
                raise InvalidParameter(message, param=f"{name}.custom_id")
            identities.add(identity)
            yield line
        if not identities:
            message = "'requests' is missing or empty."
            raise InvalidParameter(message, param="requests", code="missing_required_parameter")

    def _elements(self) -> Generator[bytes | None, None, None]:
        """Iterate over the elements of ``requests``; ignore other fields. None: more text is needed."""
        text, number = self._text, 0
        yield from text.take(b"{")
        while (yield from text.next()) != b"}":
            key = _decoded(_decode_key, (yield from text.value("a field's name")), "a field's name")
            yield from text.take(b":")
            if key != "requests":
                _decoded(_skip, (yield from text.value(key[:100])), key[:100])
            elif (yield from text.next()) != b"[":
                raise InvalidParameter("'requests' must be a list.", param="requests", code="invalid_type")
            else:
                yield from text.take(b"[")
                while (yield from text.next()) != b"]":
                    yield (yield from text.value(f"requests.{number}"))
                    number += 1
                    if (yield from text.next()) != b"]":
                        yield from text.take(b",]")
                yield from text.take(b"]")
            if (yield from text.next()) != b"}":
                yield from text.take(b",}")
        yield from text.take(b"}")
        if (yield from text.next()):
            raise _malformed("unexpected data after the end.")


def _line(raw: bytes, name: str) -> tuple[str, bytes]:
    """Validate what the batch itself needs; the rest is validated with each request. Raises InvalidParameter."""
    if not raw.startswith(b"{"):
        raise InvalidParameter(f"'{name}' must be an object.", param=name, code="invalid_type")
    request = _decoded(_decode_request, raw, name)
    custom_id, text = request.custom_id, bytes(request.params)
    if not isinstance(custom_id, str) or not _CUSTOM_ID.fullmatch(custom_id):
        message = f"'{name}.custom_id' must have 1 to 64 characters from a-z, A-Z, 0-9, _, and -."
        raise InvalidParameter(message, param=f"{name}.custom_id")
    if not text.startswith(b"{"):
        raise InvalidParameter(f"'{name}.params' must be an object.", param=f"{name}.params", code="invalid_type")
    params = _decoded(_decode_any, text, f"{name}.params")
    if is_deeper(text, params, MAX_DEPTH):
        raise _malformed(f"{name}.params is nested too deeply.")
    model = params.get("model")
    if not isinstance(model, str) or not 1 <= len(model) <= MAX_MODEL_CHARS:
        raise InvalidParameter(f"'{name}.params.model' must be a model name.", param=f"{name}.params.model")
    if params.get("stream"):
        message = f"'{name}.params.stream' must not be true: batch requests cannot be streamed."
        raise InvalidParameter(message, param=f"{name}.params.stream")
    return custom_id, LINE % (custom_id.encode(), text.replace(b"\r", b" ").replace(b"\n", b" "))


async def lines_of(
    chunks: AsyncIterator[bytes], settings: BatchSettings, in_thread: InThread
) -> AsyncIterator[list[bytes]]:
    """Iterate over the requests of a body as lists of lines. ``in_thread`` runs the parsing.

    Raises MalformedJson, InvalidParameter, BodyTooLarge, and the errors of ``chunks`` and ``in_thread``.
    """
    requests = _Requests(settings)
    async for piece, is_last in _pieces(chunks, settings.max_message_batch_bytes):
        yield await in_thread(len(piece), partial(requests.feed, piece, is_last=is_last))


async def _pieces(chunks: AsyncIterator[bytes], max_bytes: int) -> AsyncIterator[tuple[bytes, bool]]:
    """Iterate over pieces large enough for a thread, each with whether it is the last one."""
    piece, size = bytearray(), 0
    async for chunk in chunks:
        size += len(chunk)
        if size > max_bytes:
            raise BodyTooLarge(f"The body of a batch may have at most {max_bytes} bytes.")
        piece += chunk
        if len(piece) >= PIECE_BYTES:
            yield bytes(piece), False
            piece.clear()
    yield bytes(piece), True


def _decoded(decode: Callable[[bytes], _Decoded], raw: bytes, what: str) -> _Decoded:
    """Decode a value. Raises MalformedJson."""
    try:
        return decode(raw)
    except RecursionError:
        raise _malformed(f"{what} is nested too deeply.") from None
    except (*UNDECODABLE, ValueError) as error:
        raise _malformed(f"{what}: {error}.") from error


def _malformed(message: str) -> MalformedJson:
    return MalformedJson(f"We could not parse the JSON body of your request: {message}")


def _end_of(pattern: re.Pattern[bytes], text: bytes, at: int) -> int:
    """Return the end of the match of a pattern that can match the empty text."""
    match = pattern.match(text, at)
    return at if match is None else match.end()


# --- message routes ---------------------------------------------------------------------------------------------------
#
# ``/v1/messages/batches``: batches for /v1/messages in Anthropic's format.

WINDOW: Final = "24h"
WINDOW_MS: Final = 24 * 3600 * 1000
MAX_PAGE_ROWS: Final = 1000
PATH: Final = "/v1/messages/batches"
_REQUEST: Final = {
    "type": "object",
    "required": ["custom_id", "params"],
    "properties": {
        "custom_id": {"type": "string", "pattern": "^[a-zA-Z0-9_-]{1,64}$"},
        "params": {"$ref": "#/components/schemas/MessagesRequest"},
    },
}
_BODY: Final = {
    "type": "object",
    "required": ["requests"],
    "properties": {"requests": {"type": "array", "minItems": 1, "items": _REQUEST}},
}
_DESCRIBED: Final = {"requestBody": {"required": True, "content": {"application/json": {"schema": _BODY}}}}


class MessageBatchQuery(BaseModel):
    """Query of a list of batches."""

    model_config = ConfigDict(frozen=True)

    before_id: str | None = None
    after_id: str | None = None
    limit: Annotated[int, Field(ge=1, le=MAX_PAGE_ROWS)] = 20


def message_batch_router(services: BatchServices) -> APIRouter:
    """Build the router of Anthropic's message batches."""
    router = APIRouter(prefix=PATH, tags=["batches"])
    _add_collection(router, services)
    _add_single(router, services)
    _add_ended(router, services)
    return router


def _answer(services: BatchServices, request: Request, batch: Batch) -> Response:
    return json_answer(_view(batch, str(request.base_url), services.settings.file_ttl_s))


async def _asked(services: BatchServices, request: Request, batch_id: str) -> Batch:
    principal = exchange_of(request).authenticate(services.keys)
    return await batch_of(services, batch_id, principal, surface=ANTHROPIC)


def _add_collection(router: APIRouter, services: BatchServices) -> None:
    @router.post("", openapi_extra=_DESCRIBED)
    async def create_message_batch(request: Request) -> Response:
        """Create a message batch."""
        principal = exchange_of(request).authenticate(services.keys)
        async with receiving(services, request, principal) as incoming:
            return _answer(services, request, await _created(services, principal, incoming))

    @router.get("")
    async def list_message_batches(request: Request, query: Annotated[MessageBatchQuery, Query()]) -> Response:
        """List the message batches of your team, newest first."""
        principal = exchange_of(request).authenticate(services.keys)
        found, has_more = await _page(services, principal, query)
        base_url, ttl_s = str(request.base_url), services.settings.file_ttl_s
        ends = {"first_id": found[0].id, "last_id": found[-1].id} if found else {"first_id": None, "last_id": None}
        return json_answer({"data": [_view(batch, base_url, ttl_s) for batch in found], "has_more": has_more, **ends})


def _add_single(router: APIRouter, services: BatchServices) -> None:
    @router.get("/{batch_id}")
    async def retrieve_message_batch(request: Request, batch_id: str) -> Response:
        """Retrieve a message batch and its progress."""
        return _answer(services, request, await _asked(services, request, batch_id))

    @router.post("/{batch_id}/cancel")
    async def cancel_message_batch(request: Request, batch_id: str) -> Response:
        """Cancel a message batch. Completed results are kept."""
        batch = await _asked(services, request, batch_id)
        if batch.status in OVER:
            message = f"Cannot cancel {batch.id}: it has ended."
            raise InvalidParameter(message, param="batch_id", code="batch_is_over")
        await services.batches.ask_to_cancel(batch.id)
        services.changed.set()
        return _answer(services, request, await _asked(services, request, batch_id))


def _add_ended(router: APIRouter, services: BatchServices) -> None:
    @router.delete("/{batch_id}")
    async def delete_message_batch(request: Request, batch_id: str) -> Response:
        """Delete an ended message batch with its requests and results."""
        batch = await _asked(services, request, batch_id)
        if batch.status not in OVER:
            raise InvalidParameter(
                f"{batch.id} is still in progress. Cancel it first.", param="batch_id", code="batch_is_not_over"
            )
        await services.batches.delete(batch.id)
        for file_id in (batch.input_file_id, *batch.result_ids):
            if not await services.files.is_in_use(file_id, OVER):
                await services.files.delete(file_id)
        return json_answer({"id": batch.id, "type": "message_batch_deleted"})

    @router.get("/{batch_id}/results")
    async def retrieve_message_batch_results(request: Request, batch_id: str) -> Response:
        """Download the results of an ended message batch as JSON lines, in no particular order."""
        batch = await _asked(services, request, batch_id)
        if batch.status not in OVER:
            raise UnknownObject(f"{batch.id} is still in progress and has no results yet.", param="batch_id")
        if _archived_ms(batch, services.settings.file_ttl_s) is not None:
            raise UnknownObject(f"The results of {batch.id} have been deleted.", param="batch_id")
        return await _results_answer(services, batch)


async def _created(services: BatchServices, principal: Principal, incoming: Incoming) -> Batch:
    await refuse_if_too_many(services, principal)
    batch_id, file_id = new_id("msgbatch_"), new_id("file-")
    count = size = 0

    def in_thread(size_bytes: int, parse: Callable[[], list[bytes]]) -> Awaitable[list[bytes]]:
        return services.threads.run(principal.tenant, size_bytes, parse, is_quick=True)

    async with written(services, principal, file_id, incoming) as writer:
        async for lines in lines_of(incoming.chunks, services.settings, in_thread):
            data = b"".join(lines)
            count, size = count + len(lines), size + len(data)
            if size > incoming.max_bytes:
                raise BodyTooLarge(f"The requests of this batch may have at most {incoming.max_bytes} bytes.")
            if data:
                await writer.write(data)
    name, ttl_s = f"{batch_id}.jsonl", services.settings.file_ttl_s
    await add_input(services, principal, file_id, name=name, size_bytes=size, ttl_s=ttl_s)
    now_ms = unix_now_ms()
    batch = Batch(
        id=batch_id,
        surface=ANTHROPIC,
        tenant=principal.tenant,
        team_id=principal.team_id,
        key_id=principal.key_id,
        key_name=principal.key_name,
        endpoint=ENDPOINT,
        input_file_id=file_id,
        completion_window=WINDOW,
        created_unix_ms=now_ms,
        expires_unix_ms=now_ms + WINDOW_MS,
        total=count,
    )
    await services.batches.add(batch)
    services.changed.set()
    return batch


async def _page(
    services: BatchServices, principal: Principal, query: MessageBatchQuery
) -> tuple[Sequence[Batch], bool]:
    """Return the batches before or after a given one, newest first, and whether there are more in that direction."""
    if query.before_id is not None and query.after_id is not None:
        raise InvalidParameter("Send either 'before_id' or 'after_id', but not both.", param="before_id")
    mark = None
    for name, batch_id in (("before_id", query.before_id), ("after_id", query.after_id)):
        if batch_id is not None:
            mark = await batch_of(services, batch_id, principal, name, surface=ANTHROPIC)
    order: Order = "asc" if query.before_id is not None else "desc"
    most = query.limit + 1
    found = await services.batches.page(principal.tenant, mark, most, surface=ANTHROPIC, order=order)
    shown = found[: query.limit]
    return shown[::-1] if order == "asc" else shown, len(found) > query.limit


def _view(batch: Batch, base_url: str, file_ttl_s: float) -> dict[str, Any]:
    """Return a batch in Anthropic's format."""
    is_over = batch.status in OVER
    archived_ms = _archived_ms(batch, file_ttl_s)
    is_canceling = batch.status == Status.CANCELLING
    return {
        "id": batch.id,
        "type": "message_batch",
        "processing_status": "ended" if is_over else "canceling" if is_canceling else "in_progress",
        "request_counts": _counts(batch),
        "created_at": _time(batch.created_unix_ms),
        "expires_at": _time(batch.expires_unix_ms),
        "ended_at": _time(batch.over_unix_ms),
        "cancel_initiated_at": _time(batch.cancelling_unix_ms),
        "archived_at": _time(archived_ms),
        "results_url": f"{base_url.rstrip('/')}{PATH}/{batch.id}/results" if is_over and archived_ms is None else None,
    }


def _counts(batch: Batch) -> dict[str, int]:
    """Count the requests by result. Requests left by a revoked key count as errored."""
    is_cancelled = batch.status in {Status.CANCELLING, Status.CANCELLED}
    left = batch.total - batch.completed - batch.failed
    is_over = batch.status in OVER
    return {
        "processing": 0 if is_over else left,
        "succeeded": batch.completed,
        "errored": batch.failed - batch.given_up + (left if is_over else 0),
        "canceled": batch.given_up if is_cancelled else 0,
        "expired": 0 if is_cancelled else batch.given_up,
    }


def _archived_ms(batch: Batch, file_ttl_s: float) -> int | None:
    """Return when its results were deleted; None: they exist."""
    if batch.over_unix_ms is None:
        return None
    until_ms = batch.over_unix_ms + int(1000 * file_ttl_s)
    return until_ms if until_ms <= unix_now_ms() else None


def _time(unix_ms: int | None) -> str | None:
    if unix_ms is None:
        return None
    return datetime.fromtimestamp(unix_ms / 1000, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


async def _results_answer(services: BatchServices, batch: Batch) -> Response:
    pieces: AsyncIterator[bytes] = results_of(services.files, batch)
    try:
        first = await anext(pieces, b"")
    except FileGone as error:
        raise UnknownObject(f"The results of {batch.id} have been deleted.", param="batch_id") from error
    except StorageError as error:
        raise StorageUnavailable from error
    return StreamingResponse(resumed(first, pieces), media_type="application/x-jsonl")
