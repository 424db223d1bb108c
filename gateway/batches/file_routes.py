"""``/v1/files``, as OpenAI's clients know it. A file belongs to the team of the key that made it."""

from collections.abc import AsyncIterator
from typing import Annotated, Any, Final

from fastapi import APIRouter, Query, Request, Response
from fastapi.responses import StreamingResponse
from pydantic import BaseModel, ConfigDict, Field

from db.accounts.principal import Principal
from gateway.batches.files import File, FileGone, Order, new_id
from gateway.batches.receiving import BATCH, Incoming, add_input, receiving, written
from gateway.batches.services import BatchServices
from gateway.batches.states import OVER
from gateway.batches.storage.base import StorageError
from gateway.batches.upload import Upload, receive_upload
from gateway.errors import InvalidParameter, StorageUnavailable, UnknownObject
from gateway.http.pages import exchange_of, json_answer

PURPOSES: Final = (BATCH, "batch_output")
MAX_PAGE_ROWS: Final = 10_000  # as OpenAI has it
LEAST_TTL_S: Final = 3600  # that a client may ask for, as OpenAI has it
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
    """Which files to list."""

    model_config = ConfigDict(frozen=True)

    after: str | None = None
    limit: Annotated[int, Field(ge=1, le=MAX_PAGE_ROWS)] = MAX_PAGE_ROWS
    order: Order = "desc"
    purpose: str | None = None


def file_view(file: File) -> dict[str, Any]:
    """A file as the API shows it."""
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
    """Return a file that the key may see. Raises UnknownObject."""
    file = await services.files.find(file_id, principal.tenant)
    if file is None:
        raise UnknownObject(f"No such File object: {file_id[:100]}", param=param)
    return file


def file_router(services: BatchServices) -> APIRouter:
    """Build the router of files."""
    router = APIRouter(prefix="/v1/files", tags=["files"])

    @router.post("", openapi_extra=_FORM)
    async def upload_file(request: Request) -> Response:
        """Upload a file, such as the lines of a batch. It is written as it comes."""
        principal = exchange_of(request).authenticate(services.keys)
        async with receiving(services, request, principal) as incoming:
            return json_answer(file_view(await _uploaded(services, request, principal, incoming)))

    @router.get("")
    async def list_files(request: Request, query: Annotated[FileQuery, Query()]) -> Response:
        """List the files of the key's team; `after` is the last id of the previous page."""
        principal = exchange_of(request).authenticate(services.keys)
        after = None if query.after is None else await file_of(services, query.after, principal, "after")
        found = await services.files.page(principal.tenant, after, query.limit + 1, query.order, query.purpose)
        return json_answer(list_view([file_view(file) for file in found], query.limit))

    @router.get("/{file_id}")
    async def retrieve_file(request: Request, file_id: str) -> Response:
        """Retrieve a file, without its content."""
        principal = exchange_of(request).authenticate(services.keys)
        return json_answer(file_view(await file_of(services, file_id, principal)))

    @router.get("/{file_id}/content")
    async def retrieve_file_content(request: Request, file_id: str) -> Response:
        """Read the content of a file."""
        principal = exchange_of(request).authenticate(services.keys)
        file = await file_of(services, file_id, principal)
        return await content_answer(services, file)

    @router.delete("/{file_id}")
    async def delete_file(request: Request, file_id: str) -> Response:
        """Delete a file, unless a batch reads it."""
        principal = exchange_of(request).authenticate(services.keys)
        file = await file_of(services, file_id, principal)
        if await services.files.is_in_use(file.id, OVER):
            raise InvalidParameter(f"A batch reads {file.id}: cancel it first.", param="file_id", code="file_in_use")
        await services.files.delete(file.id)
        return json_answer({"id": file.id, "object": "file", "deleted": True})

    return router


def list_view(data: list[dict[str, Any]], limit: int) -> dict[str, Any]:
    """A page, of one row more than it shows where there are more."""
    shown = data[:limit]
    ends = (shown[0]["id"], shown[-1]["id"]) if shown else (None, None)
    return {"object": "list", "data": shown, "first_id": ends[0], "last_id": ends[1], "has_more": len(data) > limit}


async def content_answer(services: BatchServices, file: File) -> Response:
    """Stream a file; what fails before its first byte is an error, later the connection breaks off."""
    pieces = services.files.content(file.id)
    try:
        first = await anext(pieces, b"")
    except FileGone as error:
        raise UnknownObject(f"No such File object: {file.id}", param="file_id") from error
    except StorageError as error:
        raise StorageUnavailable from error
    headers = {"content-length": str(file.size_bytes), "content-disposition": _disposition(file.filename)}
    return StreamingResponse(resumed(first, pieces), media_type="application/octet-stream", headers=headers)


async def resumed(first: bytes, rest: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """Iterate over what has been read already, and over what follows."""
    yield first
    async for piece in rest:
        yield piece


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
    """Check what has come beside the file; return how long to keep it. Raises InvalidParameter."""
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
        raise InvalidParameter(f"'{purpose[:100]}' is not supported: use 'batch'.", param="purpose")
    seconds, anchor = upload.fields.get("expires_after[seconds]"), upload.fields.get("expires_after[anchor]")
    if anchor not in {None, "created_at"}:
        raise InvalidParameter("It must be 'created_at'.", param="expires_after[anchor]")
    if seconds is None:
        return most_s
    if not (seconds.isascii() and seconds.isdigit() and LEAST_TTL_S <= int(seconds[:12]) <= most_s):
        message = f"It must be a whole number from {LEAST_TTL_S} to {most_s:.0f}."
        raise InvalidParameter(message, param="expires_after[seconds]")
    return float(seconds)
