"""``/v1/responses/{id}``: stored responses, in OpenAI's format. They belong to the key's team."""

import time
from collections.abc import Callable
from functools import partial
from typing import Annotated, Final, Literal, TypeVar

from fastapi import APIRouter, Query, Request, Response
from fastapi.responses import StreamingResponse
from pydantic import BaseModel, ConfigDict, Field

from db.accounts.keyring import KeyRing
from db.accounts.principal import Principal
from gateway.api.openai_responses import refuse_included
from gateway.errors import InvalidParameter, StorageUnavailable, UnknownObject
from gateway.http.pages import exchange_of, json_answer
from gateway.responses.messages import Key, Unreadable
from gateway.responses.reading import follow
from gateway.responses.store import Kept, ResponseStore, State, retry_bus
from protocol.errors import BusError, ProtocolError
from protocol.process import wait_for

CANCEL_LIMIT_S: Final = 5.0  # maximum wait for the cancellation
CANCEL_LOOK_S: Final = 0.5
MAX_PAGE_ITEMS: Final = 100
SSE_HEADERS: Final = {"cache-control": "no-cache", "x-accel-buffering": "no"}
_AWAY: Final = (BusError, ProtocolError)

_View = TypeVar("_View")


class _Query(BaseModel):
    model_config = ConfigDict(frozen=True)

    include: Annotated[list[str], Field(alias="include[]")] = []  # pydantic copies the default


class RetrieveQuery(_Query):
    """Query of GET /v1/responses/{id}."""

    stream: bool = False
    starting_after: Annotated[int | None, Field(ge=0)] = None
    include_obfuscation: bool = False


class ItemsQuery(_Query):
    """Query of GET /v1/responses/{id}/input_items."""

    after: str | None = None
    limit: Annotated[int, Field(ge=1, le=MAX_PAGE_ITEMS)] = 20
    order: Literal["asc", "desc"] = "desc"


class KeptResponses:
    """Reads stored responses. Raises UnknownObject, InvalidParameter, StorageUnavailable, and errors of ``Shares``."""

    def __init__(self, store: ResponseStore) -> None:
        self.store = store

    async def read(self, key: Key, view: Callable[[Kept], _View]) -> _View:
        """Return the result of ``view`` for a response of the key's team."""
        try:
            found = await retry_bus(lambda: self.store.read(key, view))
        except Unreadable as error:
            raise InvalidParameter(f"The response cannot be read: {error}.", param="response_id") from error
        except _AWAY as error:
            raise StorageUnavailable from error
        if found is None:
            raise _unknown(key)
        return found

    async def cancel(self, key: Key) -> bytes:
        """Cancel a background response, and wait briefly. An ended response stays unchanged."""
        is_over, state, answer = await self.read(key, _with_state)
        if not state.background:
            message = "Only background responses ('background': true) can be canceled."
            raise InvalidParameter(message, param="response_id")
        if is_over:
            return answer
        try:
            async with self.store.listening(key) as added:
                await retry_bus(partial(self.store.cancel, key))
                until_s = time.monotonic() + CANCEL_LIMIT_S
                while not is_over and time.monotonic() < until_s:
                    added.clear()
                    is_over, _, answer = await self.read(key, _with_state)
                    if not is_over:
                        await wait_for(added, CANCEL_LOOK_S)
        except _AWAY as error:
            raise StorageUnavailable from error
        return answer

    async def delete(self, key: Key) -> None:
        """Delete an ended or unreadable response."""
        try:
            is_over = await retry_bus(partial(self._is_over, key))
            if is_over is None:
                raise _unknown(key)
            if not is_over:
                message = "The response is still in progress. Cancel it first."
                raise InvalidParameter(message, param="response_id", code="response_in_progress")
            await retry_bus(partial(self.store.delete, key))
        except _AWAY as error:
            raise StorageUnavailable from error

    async def _is_over(self, key: Key) -> bool | None:
        """Return whether a response has ended; None: it does not exist."""
        if await self.store.has_ended(key):
            return True
        try:
            return await self.store.read(key, lambda kept: kept.is_over)
        except ProtocolError:
            return True


def _with_state(kept: Kept) -> tuple[bool, State, bytes]:
    return kept.is_over, kept.state, kept.answer


def _unknown(key: Key) -> UnknownObject:
    return UnknownObject(f"Response with id '{key.response_id[:100]}' not found.", param="response_id")


def responses_router(keys: KeyRing, store: ResponseStore, comment_s: float) -> APIRouter:
    """Build the router. ``comment_s``: seconds between comments in a silent stream; 0: none."""
    router = APIRouter(prefix="/v1/responses/{response_id}", tags=["responses"])
    kept = KeptResponses(store)

    def key_of(request: Request, response_id: str) -> Key:
        principal: Principal = exchange_of(request).authenticate(keys)
        return Key(principal.tenant, response_id)

    @router.get("")
    async def retrieve_response(
        request: Request, response_id: str, query: Annotated[RetrieveQuery, Query()]
    ) -> Response:
        """Retrieve a response. With `stream`, stream the events of a background response after `starting_after`."""
        key = key_of(request, response_id)
        refuse_included(query.include)
        if query.include_obfuscation:
            param = "include_obfuscation"
            raise InvalidParameter(f"'{param}' is not supported.", param=param, code="unsupported_parameter")
        if not query.stream and query.starting_after is None:
            return _json(await kept.read(key, lambda found: found.answer))
        _check_stream(await kept.read(key, lambda found: found.state), query)
        after = -1 if query.starting_after is None else query.starting_after
        events = follow(store, key, after, comment_s)  # errors from here on abort the connection
        return StreamingResponse(events, media_type="text/event-stream", headers=SSE_HEADERS)

    @router.delete("")
    async def delete_response(request: Request, response_id: str) -> Response:
        """Delete a response and its events."""
        await kept.delete(key_of(request, response_id))
        return json_answer({"id": response_id, "object": "response", "deleted": True})

    @router.post("/cancel")
    async def cancel_response(request: Request, response_id: str) -> Response:
        """Cancel a background response."""
        return _json(await kept.cancel(key_of(request, response_id)))

    @router.get("/input_items")
    async def list_input_items(request: Request, response_id: str, query: Annotated[ItemsQuery, Query()]) -> Response:
        """List the input items of a response, including earlier turns. `after` is the last id of the previous page."""
        key = key_of(request, response_id)
        refuse_included(query.include)
        return _json(await kept.read(key, lambda found: found.page(query.after, query.limit, query.order)))

    return router


def _json(body: bytes) -> Response:
    return Response(body, media_type="application/json")


def _check_stream(state: State, query: RetrieveQuery) -> None:
    if not query.stream:
        raise InvalidParameter("'starting_after' requires stream=true.", param="starting_after")
    if not state.background:
        message = "Only background responses ('background': true) have events to stream."
        raise InvalidParameter(message, param="stream")
