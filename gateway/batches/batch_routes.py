"""``/v1/batches``, as OpenAI's clients know it."""

import re
from collections.abc import Mapping
from typing import Annotated, Any, Final, Literal

import msgspec
from fastapi import APIRouter, Query, Request, Response
from pydantic import BaseModel, ConfigDict, Field, field_validator

from db.accounts.principal import Principal
from gateway.api.fields import Body, check_values, parse_body
from gateway.batches.file_routes import LEAST_TTL_S, file_of, list_view
from gateway.batches.files import new_id
from gateway.batches.receiving import BATCH
from gateway.batches.services import BatchServices
from gateway.batches.states import OPENAI, OVER
from gateway.batches.store import Batch
from gateway.errors import InvalidParameter, UnknownObject, too_many
from gateway.http.body import read_body
from gateway.http.pages import body_schema, exchange_of, json_answer
from protocol.nats.clock import unix_now_ms

MAX_PAGE_ROWS: Final = 100
MAX_BODY_BYTES: Final = 64 * 1024
BODY_LIMIT_S: Final = 30.0
_WINDOW: Final = re.compile(r"^([1-9][0-9]{0,4})([mhd])$")
_UNITS_S: Final = {"m": 60, "h": 3600, "d": 24 * 3600}
MAX_WINDOW_S: Final = 14 * 24 * 3600


class OutputExpiry(Body):
    """How long results are kept."""

    anchor: Literal["created_at"]
    seconds: Annotated[int, Field(ge=LEAST_TTL_S, le=30 * 24 * 3600)]


class NewBatch(Body):
    """A batch to create."""

    input_file_id: str
    endpoint: str
    completion_window: str = "24h"  # OpenAI's only one; ours may be as "90m", "6h" or "7d"
    metadata: Annotated[dict[str, Annotated[str, Field(max_length=512)]] | None, Field(max_length=16)] = None
    output_expires_after: OutputExpiry | None = None

    @field_validator("completion_window")
    @classmethod
    def _must_be_a_time(cls, text: str) -> str:
        if _WINDOW.match(text) is None or window_s(text) > MAX_WINDOW_S:
            raise ValueError("It must be '24h', or another number of minutes, hours or days, 14 at most ('90m', '7d').")
        return text


class BatchQuery(BaseModel):
    """Which batches to list."""

    model_config = ConfigDict(frozen=True)

    after: str | None = None
    limit: Annotated[int, Field(ge=1, le=MAX_PAGE_ROWS)] = 20


def window_s(text: str) -> int:
    """Return a completion window in seconds; it is valid."""
    return int(text[:-1]) * _UNITS_S[text[-1]]


def batch_view(batch: Batch) -> dict[str, Any]:
    """A batch as OpenAI shows it."""
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
    """Return a batch of this surface that the key may see. Raises UnknownObject."""
    batch = await services.batches.find(batch_id, principal.tenant, surface)
    if batch is None:
        raise UnknownObject(f"No batch found with id '{batch_id[:100]}'.", param=param)
    return batch


async def refuse_if_too_many(services: BatchServices, principal: Principal) -> None:
    """Raise RateLimitExceeded where the tenant has as many open batches as it may."""
    count = await services.batches.count_open(principal.tenant)
    if count >= services.settings.max_tenant_batches:
        raise too_many(f"{count} batches of this key or its team are not over yet.", "too_many_batches")


def batch_router(services: BatchServices) -> APIRouter:
    """Build the router of batches."""
    router = APIRouter(prefix="/v1/batches", tags=["batches"])

    @router.post("", openapi_extra=body_schema("NewBatch"))
    async def create_batch(request: Request) -> Response:
        """Create a batch out of an uploaded file."""
        exchange = exchange_of(request)
        principal = exchange.authenticate(services.keys)
        body = await read_body(request.receive, exchange.headers, MAX_BODY_BYTES, BODY_LIMIT_S)
        check_values(body)
        batch = await _created(services, principal, parse_body(NewBatch, body))
        return json_answer(batch_view(batch))

    @router.get("")
    async def list_batches(request: Request, query: Annotated[BatchQuery, Query()]) -> Response:
        """List the batches of the key's team, newest first; `after` is the last id of the previous page."""
        principal = exchange_of(request).authenticate(services.keys)
        after = None if query.after is None else await batch_of(services, query.after, principal, "after")
        found = await services.batches.page(principal.tenant, after, query.limit + 1, surface=OPENAI)
        return json_answer(list_view([batch_view(batch) for batch in found], query.limit))

    @router.get("/{batch_id}")
    async def retrieve_batch(request: Request, batch_id: str) -> Response:
        """Retrieve a batch, with how far it is."""
        principal = exchange_of(request).authenticate(services.keys)
        return json_answer(batch_view(await batch_of(services, batch_id, principal)))

    @router.post("/{batch_id}/cancel")
    async def cancel_batch(request: Request, batch_id: str) -> Response:
        """Cancel a batch. What is done stays, in its files."""
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
        raise InvalidParameter(f"'{asked.endpoint[:100]}' takes no batches: use one of {allowed}.", param="endpoint")
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
