"""``/v1/messages/batches``, as Anthropic's clients know it: a batch for /v1/messages, in other shapes."""

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from datetime import UTC, datetime
from typing import Annotated, Any, Final

from fastapi import APIRouter, Query, Request, Response
from fastapi.responses import StreamingResponse
from pydantic import BaseModel, ConfigDict, Field

from db.accounts.principal import Principal
from gateway.batches.batch_routes import batch_of, refuse_if_too_many
from gateway.batches.file_routes import resumed
from gateway.batches.files import FileGone, Order, new_id
from gateway.batches.message_requests import ENDPOINT, lines_of
from gateway.batches.message_results import results_of
from gateway.batches.receiving import Incoming, add_input, receiving, written
from gateway.batches.services import BatchServices
from gateway.batches.states import ANTHROPIC, OVER, Status
from gateway.batches.storage.base import StorageError
from gateway.batches.store import Batch
from gateway.errors import BodyTooLarge, InvalidParameter, StorageUnavailable, UnknownObject
from gateway.http.pages import exchange_of, json_answer
from protocol.nats.clock import unix_now_ms

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
    """Which batches to list."""

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
        """Create a batch of messages. Its requests are written as they come."""
        principal = exchange_of(request).authenticate(services.keys)
        async with receiving(services, request, principal) as incoming:
            return _answer(services, request, await _created(services, principal, incoming))

    @router.get("")
    async def list_message_batches(request: Request, query: Annotated[MessageBatchQuery, Query()]) -> Response:
        """List the batches of messages of the key's team, newest first."""
        principal = exchange_of(request).authenticate(services.keys)
        found, has_more = await _page(services, principal, query)
        base_url, ttl_s = str(request.base_url), services.settings.file_ttl_s
        ends = {"first_id": found[0].id, "last_id": found[-1].id} if found else {"first_id": None, "last_id": None}
        return json_answer({"data": [_view(batch, base_url, ttl_s) for batch in found], "has_more": has_more, **ends})


def _add_single(router: APIRouter, services: BatchServices) -> None:
    @router.get("/{batch_id}")
    async def retrieve_message_batch(request: Request, batch_id: str) -> Response:
        """Retrieve a batch of messages, with how far it is."""
        return _answer(services, request, await _asked(services, request, batch_id))

    @router.post("/{batch_id}/cancel")
    async def cancel_message_batch(request: Request, batch_id: str) -> Response:
        """Cancel a batch of messages. What is done stays."""
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
        """Delete a batch of messages that has ended, with its requests and results."""
        batch = await _asked(services, request, batch_id)
        if batch.status not in OVER:
            raise InvalidParameter(
                f"{batch.id} has not ended: cancel it first.", param="batch_id", code="batch_is_not_over"
            )
        await services.batches.delete(batch.id)
        for file_id in (batch.input_file_id, *batch.result_ids):
            if not await services.files.is_in_use(file_id, OVER):
                await services.files.delete(file_id)
        return json_answer({"id": batch.id, "type": "message_batch_deleted"})

    @router.get("/{batch_id}/results")
    async def retrieve_message_batch_results(request: Request, batch_id: str) -> Response:
        """Read the results of a batch of messages that has ended, one a line, in no order."""
        batch = await _asked(services, request, batch_id)
        if batch.status not in OVER:
            raise UnknownObject(f"{batch.id} has no results yet: it has not ended.", param="batch_id")
        if _archived_ms(batch, services.settings.file_ttl_s) is not None:
            raise UnknownObject(f"The results of {batch.id} are no longer kept.", param="batch_id")
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
    """Return the batches before or after one, newest first, and whether there are more of them that way."""
    if query.before_id is not None and query.after_id is not None:
        raise InvalidParameter("Say 'before_id' or 'after_id', not both.", param="before_id")
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
    """A batch as Anthropic shows it."""
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
    """Count the requests by their results; what a revoked key has left has failed, too."""
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
    """Return when its results were deleted; None: they are there."""
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
        raise UnknownObject(f"The results of {batch.id} are no longer kept.", param="batch_id") from error
    except StorageError as error:
        raise StorageUnavailable from error
    return StreamingResponse(resumed(first, pieces), media_type="application/x-jsonl")
