"""``/v1/files`` and ``/v1/batches``: OpenAI's Files and Batch APIs."""

import re
from collections.abc import Mapping
from typing import Annotated, Any, Final, Literal

import msgspec
from fastapi import APIRouter, Query, Request, Response
from fastapi.responses import StreamingResponse
from pydantic import BaseModel, ConfigDict, Field, field_validator

from db.accounts.principal import Principal
from gateway.api.fields import Body, parse_body
from gateway.api.values import check_values
from gateway.batches.files import File, FileGone, Order, new_id
from gateway.batches.parts import BatchServices
from gateway.batches.storage.base import StorageError
from gateway.batches.store import OPENAI, OVER, Batch
from gateway.batches.upload import BATCH, Incoming, Upload, add_input, receive_upload, receiving, written
from gateway.errors import InvalidParameter, StorageUnavailable, UnknownObject, too_many
from gateway.http.body import read_body
from gateway.http.pages import body_schema, exchange_of, json_answer, resumed
from protocol.nats.clock import unix_now_ms

# --- file routes ------------------------------------------------------------------------------------------------------
#
# ``/v1/files``. A file belongs to the team of the key that uploaded it.

PURPOSES: Final = (BATCH, "batch_output")
MAX_FILES_PAGE_ROWS: Final = 10_000  # as in OpenAI's API
LEAST_TTL_S: Final = 3600  # minimum expiry, as in OpenAI's API
_FORM: Final = {
    "requestBody": {
        "required": True,
        "content": {
            "multipart/form-data": {
                "schema": {
                    "type": "object",
                    "required": ["file", "purpose"],
                    "properties": {
                        "file": {"type": "string", "format": "binary"},
                        "purpose": {"type": "string", "enum": [BATCH]},
                        "expires_after[anchor]": {"type": "string", "enum": ["created_at"]},
                        "expires_after[seconds]": {"type": "integer", "minimum": LEAST_TTL_S},
                    },
                }
            }
        },
    }
}


class FileQuery(BaseModel):
    """Query of a list of files."""

    model_config = ConfigDict(frozen=True)

    after: str | None = None
    limit: Annotated[int, Field(ge=1, le=MAX_FILES_PAGE_ROWS)] = MAX_FILES_PAGE_ROWS
    order: Order = "desc"
    purpose: str | None = None


def file_view(file: File) -> dict[str, Any]:
    """Return a file in OpenAI's format."""
    return {
        "id": file.id,
        "object": "file",
        "bytes": file.size_bytes,
        "created_at": file.created_unix_ms // 1000,
        "expires_at": file.expires_unix_ms // 1000,
        "filename": file.filename,
        "purpose": file.purpose,
        "status": "processed",
        "status_details": None,
    }


async def file_of(services: BatchServices, file_id: str, principal: Principal, param: str = "file_id") -> File:
    """Return a file of the key's team. Raises UnknownObject."""
    file = await services.files.find(file_id, principal.tenant)
    if file is None:
        raise UnknownObject(f"No such File object: {file_id[:100]}", param=param)
    return file


def file_router(services: BatchServices) -> APIRouter:
    """Build the router of files."""
    router = APIRouter(prefix="/v1/files", tags=["files"])

    @router.post("", openapi_extra=_FORM)
    async def upload_file(request: Request) -> Response:
        """Upload a file, such as the input of a batch."""
        principal = exchange_of(request).authenticate(services.keys)
        async with receiving(services, request, principal) as incoming:
            return json_answer(file_view(await _uploaded(services, request, principal, incoming)))

    @router.get("")
    async def list_files(request: Request, query: Annotated[FileQuery, Query()]) -> Response:
        """List the files of your team. `after` is the last id of the previous page."""
        principal = exchange_of(request).authenticate(services.keys)
        after = None if query.after is None else await file_of(services, query.after, principal, "after")
        found = await services.files.page(principal.tenant, after, query.limit + 1, query.order, query.purpose)
        return json_answer(list_view([file_view(file) for file in found], query.limit))

    @router.get("/{file_id}")
    async def retrieve_file(request: Request, file_id: str) -> Response:
        """Retrieve a file's metadata."""
        principal = exchange_of(request).authenticate(services.keys)
        return json_answer(file_view(await file_of(services, file_id, principal)))

    @router.get("/{file_id}/content")
    async def retrieve_file_content(request: Request, file_id: str) -> Response:
        """Download the content of a file."""
        principal = exchange_of(request).authenticate(services.keys)
        file = await file_of(services, file_id, principal)
        return await content_answer(services, file)

    @router.delete("/{file_id}")
    async def delete_file(request: Request, file_id: str) -> Response:
        """Delete a file. Fails while a batch uses the file as input."""
        principal = exchange_of(request).authenticate(services.keys)
        file = await file_of(services, file_id, principal)
        if await services.files.is_in_use(file.id, OVER):
            raise InvalidParameter(
                f"{file.id} is the input of a batch in progress. Cancel the batch first.",
                param="file_id",
                code="file_in_use",
            )
        await services.files.delete(file.id)
        return json_answer({"id": file.id, "object": "file", "deleted": True})

    return router


def list_view(data: list[dict[str, Any]], limit: int) -> dict[str, Any]:
    """Return a page of a list. ``data`` has one extra element if there are more."""
    shown = data[:limit]
    ends = (shown[0]["id"], shown[-1]["id"]) if shown else (None, None)
    return {"object": "list", "data": shown, "first_id": ends[0], "last_id": ends[1], "has_more": len(data) > limit}


async def content_answer(services: BatchServices, file: File) -> Response:
    """Stream a file. A failure before the first byte is an error; later it aborts the connection."""
    pieces = services.files.content(file.id)
    try:
        first = await anext(pieces, b"")
    except FileGone as error:
        raise UnknownObject(f"No such File object: {file.id}", param="file_id") from error
    except StorageError as error:
        raise StorageUnavailable from error
    headers = {"content-length": str(file.size_bytes), "content-disposition": _disposition(file.filename)}
    return StreamingResponse(resumed(first, pieces), media_type="application/octet-stream", headers=headers)


def _disposition(filename: str) -> str:
    plain = "".join(char if char.isascii() and char.isprintable() and char not in '"\\' else "_" for char in filename)
    return f'attachment; filename="{plain}"'


async def _uploaded(services: BatchServices, request: Request, principal: Principal, incoming: Incoming) -> File:
    file_id = new_id("file-")
    async with written(services, principal, file_id, incoming) as writer:
        content_type = request.headers.get("content-type", "")
        upload = await receive_upload(incoming.chunks, content_type, writer, max_bytes=incoming.max_bytes)
        ttl_s = _checked_ttl_s(upload, services.settings.file_ttl_s)
    name = upload.filename or "file"
    return await add_input(services, principal, file_id, name=name, size_bytes=upload.size_bytes, ttl_s=ttl_s)


def _checked_ttl_s(upload: Upload, most_s: float) -> float:
    """Validate the form fields of an upload; return the file's time to live. Raises InvalidParameter."""
    if upload.filename is None:
        raise InvalidParameter("Missing required parameter: 'file'.", param="file", code="missing_required_parameter")
    if not upload.size_bytes:
        raise InvalidParameter("The file is empty.", param="file", code="empty_file")
    purpose = upload.fields.get("purpose")
    if purpose is None:
        raise InvalidParameter(
            "Missing required parameter: 'purpose'.", param="purpose", code="missing_required_parameter"
        )
    if purpose != BATCH:
        raise InvalidParameter(f"'{purpose[:100]}' is not supported. Use 'batch'.", param="purpose")
    seconds, anchor = upload.fields.get("expires_after[seconds]"), upload.fields.get("expires_after[anchor]")
    if anchor not in {None, "created_at"}:
        raise InvalidParameter("'expires_after[anchor]' must be 'created_at'.", param="expires_after[anchor]")
    if seconds is None:
        return most_s
    if not (seconds.isascii() and seconds.isdigit() and LEAST_TTL_S <= int(seconds[:12]) <= most_s):
        message = f"'expires_after[seconds]' must be an integer from {LEAST_TTL_S} to {most_s:.0f}."
        raise InvalidParameter(message, param="expires_after[seconds]")
    return float(seconds)


# --- batch routes -----------------------------------------------------------------------------------------------------
#
# ``/v1/batches``.

MAX_BATCHES_PAGE_ROWS: Final = 100
MAX_BODY_BYTES: Final = 64 * 1024
BODY_LIMIT_S: Final = 30.0
_WINDOW: Final = re.compile(r"^([1-9][0-9]{0,4})([mhd])$")
_UNITS_S: Final = {"m": 60, "h": 3600, "d": 24 * 3600}
MAX_WINDOW_S: Final = 14 * 24 * 3600


class OutputExpiry(Body):
    """How long result files are kept."""

    anchor: Literal["created_at"]
    seconds: Annotated[int, Field(ge=LEAST_TTL_S, le=30 * 24 * 3600)]


class NewBatch(Body):
    """A batch to create."""

    input_file_id: str
    endpoint: str
    completion_window: str = "24h"  # OpenAI's only value; others such as "90m", "6h", or "7d" are allowed
    metadata: Annotated[dict[str, Annotated[str, Field(max_length=512)]] | None, Field(max_length=16)] = None
    output_expires_after: OutputExpiry | None = None

    @field_validator("completion_window")
    @classmethod
    def _must_be_a_time(cls, text: str) -> str:
        if _WINDOW.match(text) is None or window_s(text) > MAX_WINDOW_S:
            raise ValueError(
                "must be a number of minutes, hours, or days, such as '90m', '24h', or '7d', and at most 14 days."
            )
        return text


class BatchQuery(BaseModel):
    """Query of a list of batches."""

    model_config = ConfigDict(frozen=True)

    after: str | None = None
    limit: Annotated[int, Field(ge=1, le=MAX_BATCHES_PAGE_ROWS)] = 20


def window_s(text: str) -> int:
    """Return a valid completion window in seconds."""
    return int(text[:-1]) * _UNITS_S[text[-1]]


def batch_view(batch: Batch) -> dict[str, Any]:
    """Return a batch in OpenAI's format."""
    over = {f"{end}_at": _s(batch.over_unix_ms) if batch.status == end else None for end in OVER}
    return {
        "id": batch.id,
        "object": "batch",
        "endpoint": batch.endpoint,
        "model": _only_model(batch),
        "errors": None if batch.errors is None else {"object": "list", "data": msgspec.json.decode(batch.errors)},
        "input_file_id": batch.input_file_id,
        "completion_window": batch.completion_window,
        "status": batch.status,
        "output_file_id": batch.output_file_id,
        "error_file_id": batch.error_file_id,
        "created_at": _s(batch.created_unix_ms),
        "in_progress_at": _s(batch.in_progress_unix_ms),
        "expires_at": _s(batch.expires_unix_ms),
        "finalizing_at": _s(batch.finalizing_unix_ms),
        "cancelling_at": _s(batch.cancelling_unix_ms),
        **over,
        "request_counts": {"total": batch.total, "completed": batch.completed, "failed": batch.failed},
        "usage": {
            "input_tokens": batch.prompt_tokens,
            "input_tokens_details": {"cached_tokens": batch.cached_tokens},
            "output_tokens": batch.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": batch.prompt_tokens + batch.completion_tokens,
        },
        "metadata": None if batch.custom_metadata is None else msgspec.json.decode(batch.custom_metadata),
    }


def _only_model(batch: Batch) -> str | None:
    models: Mapping[str, Any] = msgspec.json.decode(batch.models) if batch.models else {}
    return next(iter(models)) if len(models) == 1 else None


def _s(unix_ms: int | None) -> int | None:
    return None if unix_ms is None else unix_ms // 1000


async def batch_of(
    services: BatchServices, batch_id: str, principal: Principal, param: str = "batch_id", *, surface: str = OPENAI
) -> Batch:
    """Return a batch of this surface and the key's team. Raises UnknownObject."""
    batch = await services.batches.find(batch_id, principal.tenant, surface)
    if batch is None:
        raise UnknownObject(f"No batch found with id '{batch_id[:100]}'.", param=param)
    return batch


async def refuse_if_too_many(services: BatchServices, principal: Principal) -> None:
    """Raise RateLimitExceeded if the tenant has reached its limit of open batches."""
    count = await services.batches.count_open(principal.tenant)
    if count >= services.settings.max_tenant_batches:
        raise too_many(
            f"{count} batches of this API key or its team are in progress. Wait until one of them ends, or cancel one.",
            "too_many_batches",
        )


def batch_router(services: BatchServices) -> APIRouter:
    """Build the router of batches."""
    router = APIRouter(prefix="/v1/batches", tags=["batches"])

    @router.post("", openapi_extra=body_schema("NewBatch"))
    async def create_batch(request: Request) -> Response:
        """Create a batch from an uploaded file."""
        exchange = exchange_of(request)
        principal = exchange.authenticate(services.keys)
        body = await read_body(request.receive, exchange.headers, MAX_BODY_BYTES, BODY_LIMIT_S)
        check_values(body)
        batch = await _created(services, principal, parse_body(NewBatch, body))
        return json_answer(batch_view(batch))

    @router.get("")
    async def list_batches(request: Request, query: Annotated[BatchQuery, Query()]) -> Response:
        """List the batches of your team, newest first. `after` is the last id of the previous page."""
        principal = exchange_of(request).authenticate(services.keys)
        after = None if query.after is None else await batch_of(services, query.after, principal, "after")
        found = await services.batches.page(principal.tenant, after, query.limit + 1, surface=OPENAI)
        return json_answer(list_view([batch_view(batch) for batch in found], query.limit))

    @router.get("/{batch_id}")
    async def retrieve_batch(request: Request, batch_id: str) -> Response:
        """Retrieve a batch and its progress."""
        principal = exchange_of(request).authenticate(services.keys)
        return json_answer(batch_view(await batch_of(services, batch_id, principal)))

    @router.post("/{batch_id}/cancel")
    async def cancel_batch(request: Request, batch_id: str) -> Response:
        """Cancel a batch. Completed lines stay in its result files."""
        principal = exchange_of(request).authenticate(services.keys)
        batch = await batch_of(services, batch_id, principal)
        if batch.status in OVER:
            message = f"Cannot cancel a batch with status '{batch.status}'."
            raise InvalidParameter(message, param="batch_id", code="batch_is_over")
        await services.batches.ask_to_cancel(batch.id)
        services.changed.set()
        return json_answer(batch_view(await batch_of(services, batch_id, principal)))

    return router


async def _created(services: BatchServices, principal: Principal, asked: NewBatch) -> Batch:
    if asked.endpoint not in services.endpoints:
        allowed = ", ".join(sorted(services.endpoints))
        raise InvalidParameter(
            f"'{asked.endpoint[:100]}' does not support batches. Use one of {allowed}.", param="endpoint"
        )
    file = await file_of(services, asked.input_file_id, principal, "input_file_id")
    if file.purpose != BATCH:
        raise InvalidParameter(f"{file.id} was not uploaded for purpose 'batch'.", param="input_file_id")
    await refuse_if_too_many(services, principal)
    now_ms = unix_now_ms()
    batch = Batch(
        id=new_id("batch_"),
        surface=OPENAI,
        tenant=principal.tenant,
        team_id=principal.team_id,
        key_id=principal.key_id,
        key_name=principal.key_name,
        endpoint=asked.endpoint,
        input_file_id=file.id,
        completion_window=asked.completion_window,
        created_unix_ms=now_ms,
        expires_unix_ms=now_ms + 1000 * window_s(asked.completion_window),
        custom_metadata=None if asked.metadata is None else msgspec.json.encode(asked.metadata).decode(),
        result_ttl_s=None if asked.output_expires_after is None else asked.output_expires_after.seconds,
    )
    await services.batches.add(batch)
    services.changed.set()
    return batch
