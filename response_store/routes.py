"""``/v1/responses/{id}``: what is kept of responses, as OpenAI's clients know it. They belong to the key's team."""

import time
from functools import partial
from typing import Annotated, Any, Final, Literal

import msgspec
from fastapi import APIRouter, Query, Request, Response
from fastapi.responses import StreamingResponse
from pydantic import BaseModel, ConfigDict, Field

from accounts.keyring import KeyRing
from accounts.principal import Principal
from protocol.backoff import wait_for
from protocol.errors import BusError, ProtocolError
from response_store.patience import patiently
from response_store.reading import follow
from response_store.records import EventsPart, Run
from response_store.store import Key, ResponseStore
from surfaces.responses import items_of, refuse_included
from web.answers import exchange_of, json_answer
from web.errors import InvalidParameter, StorageUnavailable, UnknownObject

CANCEL_LIMIT_S: Final = 5.0  # how long a client waits for a response to be cancelled
CANCEL_LOOK_S: Final = 0.5
MAX_PAGE_ITEMS: Final = 100
SSE_HEADERS: Final = {"cache-control": "no-cache", "x-accel-buffering": "no"}
_AWAY: Final = (BusError, ProtocolError)


class _Query(BaseModel):
    model_config = ConfigDict(frozen=True)

    include: Annotated[list[str], Field(alias="include[]")] = []  # pydantic copies it


class RetrieveQuery(_Query):
    """How to retrieve a response."""

    stream: bool = False
    starting_after: Annotated[int | None, Field(ge=0)] = None
    include_obfuscation: bool = False


class ItemsQuery(_Query):
    """Which input items to list."""

    after: str | None = None
    limit: Annotated[int, Field(ge=1, le=MAX_PAGE_ITEMS)] = 20
    order: Literal["asc", "desc"] = "desc"


class _Kept:
    """One response, in whatever state it is."""

    def __init__(self, response: bytes, items: bytes | None, run: Run | None, last: EventsPart | None) -> None:
        self._response = response
        self._items = items
        self._run = run
        self._last = last

    @property
    def is_over(self) -> bool:
        """True once nothing of it changes."""
        return self._run is None or (self._last is not None and self._last.is_last)

    @property
    def view(self) -> dict[str, Any]:
        """The response as the API shows it."""
        response: dict[str, Any] = msgspec.json.decode(self._response)
        has_begun = self._last is not None and self._last.first + self._last.count > 2
        return {**response, "status": "in_progress"} if not self.is_over and has_begun else response

    @property
    def items(self) -> list[dict[str, Any]]:
        """Its input items."""
        if self._run is not None:
            return items_of(self._run.body, self._run.response_id.removeprefix("resp_"))
        found: list[dict[str, Any]] = msgspec.json.decode(self._items or b"[]")
        return found


class KeptResponses:
    """Reads what is kept. Raises UnknownObject and StorageUnavailable."""

    def __init__(self, store: ResponseStore) -> None:
        self.store = store

    async def get(self, key: Key) -> _Kept:
        """Return a response of the key's team."""
        try:
            found = await patiently(partial(self._find, key))
        except _AWAY as error:
            raise StorageUnavailable from error
        if found is None:
            raise UnknownObject(f"Response with id '{key.response_id[:100]}' not found.", param="response_id")
        return found

    async def _find(self, key: Key) -> _Kept | None:
        return await self._running(key) or await self._ended(key) or await self._running(key)  # it may end meanwhile

    async def _ended(self, key: Key) -> _Kept | None:
        stored = await self.store.get(key)
        return None if stored is None else _Kept(stored.response, stored.items, None, None)

    async def _running(self, key: Key) -> _Kept | None:
        run = await self.store.run_of(key)
        if run is None:
            return None
        last = await self.store.last_part(key)
        response = last.response if last is not None and last.is_last else run[0].response
        return _Kept(response, None, run[0], last)

    async def cancel(self, key: Key) -> _Kept:
        """Cancel a response in the background, and wait a little until it is; one that has ended stays as it is."""
        found = await self.get(key)
        if not found.view["background"]:
            message = "Only responses in the background ('background': true) can be cancelled."
            raise InvalidParameter(message, param="response_id")
        if found.is_over:
            return found
        try:
            async with self.store.listening(key) as added:
                await patiently(partial(self.store.cancel, key))
                until_s = time.monotonic() + CANCEL_LIMIT_S
                while not found.is_over and time.monotonic() < until_s:
                    added.clear()
                    found = await self.get(key)
                    if not found.is_over:
                        await wait_for(added, CANCEL_LOOK_S)
        except _AWAY as error:
            raise StorageUnavailable from error
        return found

    async def delete(self, key: Key) -> None:
        """Delete a response that has ended."""
        found = await self.get(key)
        if not found.is_over:
            message = f"The response is '{found.view['status']}': cancel it first."
            raise InvalidParameter(message, param="response_id", code="response_in_progress")
        try:
            await patiently(partial(self.store.delete, key))
        except _AWAY as error:
            raise StorageUnavailable from error


def responses_router(keys: KeyRing, store: ResponseStore, comment_s: float) -> APIRouter:
    """Build the router. ``comment_s``: seconds between signs of life in a stream; 0: none."""
    router = APIRouter(prefix="/v1/responses/{response_id}", tags=["responses"])
    kept = KeptResponses(store)

    def key_of(request: Request, response_id: str) -> Key:
        principal: Principal = exchange_of(request).authenticate(keys)
        return Key(principal.tenant, response_id)

    @router.get("")
    async def retrieve_response(
        request: Request, response_id: str, query: Annotated[RetrieveQuery, Query()]
    ) -> Response:
        """Retrieve a response, or with `stream` the events of one in the background, those behind `starting_after`."""
        key = key_of(request, response_id)
        refuse_included(query.include)
        if query.include_obfuscation:
            param = "include_obfuscation"
            raise InvalidParameter(f"'{param}' is not supported.", param=param, code="unsupported_parameter")
        found = await kept.get(key)
        if not query.stream and query.starting_after is None:
            return json_answer(found.view)
        _check_stream(found, query)
        after = -1 if query.starting_after is None else query.starting_after
        events = follow(store, key, after, comment_s)  # what fails from here on breaks the connection off
        return StreamingResponse(events, media_type="text/event-stream", headers=SSE_HEADERS)

    @router.delete("")
    async def delete_response(request: Request, response_id: str) -> Response:
        """Delete a response, and its events."""
        await kept.delete(key_of(request, response_id))
        return json_answer({"id": response_id, "object": "response", "deleted": True})

    @router.post("/cancel")
    async def cancel_response(request: Request, response_id: str) -> Response:
        """Cancel a response in the background."""
        return json_answer((await kept.cancel(key_of(request, response_id))).view)

    @router.get("/input_items")
    async def list_input_items(request: Request, response_id: str, query: Annotated[ItemsQuery, Query()]) -> Response:
        """List what a response was made from, earlier turns included; `after` is the last id of the previous page."""
        key = key_of(request, response_id)
        refuse_included(query.include)
        return json_answer(_page((await kept.get(key)).items, query))

    return router


def _check_stream(found: _Kept, query: RetrieveQuery) -> None:
    if not query.stream:
        raise InvalidParameter("'starting_after' is for streams: add stream=true.", param="starting_after")
    if not found.view["background"]:
        message = "Only responses in the background ('background': true) have events to stream."
        raise InvalidParameter(message, param="stream")


def _page(items: list[dict[str, Any]], query: ItemsQuery) -> dict[str, Any]:
    if query.order == "desc":
        items.reverse()
    if query.after is not None:
        places = [number for number, item in enumerate(items) if item["id"] == query.after]
        if not places:
            raise UnknownObject(f"No input item with id '{query.after[:100]}'.", param="after")
        items = items[places[0] + 1 :]
    shown = items[: query.limit]
    ends = (shown[0]["id"], shown[-1]["id"]) if shown else (None, None)
    page = {"object": "list", "data": shown, "first_id": ends[0], "last_id": ends[1]}
    return {**page, "has_more": len(items) > query.limit}
