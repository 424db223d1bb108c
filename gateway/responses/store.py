"""The stream RES of stored and background responses. Every message has its own time to live.

    res.<tenant>.<id>.run          Run: while it runs in the background
    res.<tenant>.<id>.events       EventsPart, …: its events, in order
    res.<tenant>.<id>.cancel       empty: a cancellation request
    res.<tenant>.<id>.done.<KiB>   StoredResponse
    res.<tenant>.<id>.size.<KiB>   empty: size of its run and events; the largest counts

The gateway that runs a response owns its ``run``. Others take it over by compare-and-set after that gateway is lost.
The events are fenced: each part names the sequence number of the previous one, so a gateway that was presumed dead
cannot add events. Sizes are part of the subjects, so that the server can count a tenant's usage.

Messages for clients are opened within the tenant's share of memory and threads (``Shares``).
"""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial
from typing import Any, Final, Literal, Protocol, TypeVar

import msgspec
from msgspec import Struct
from nats.aio.msg import Msg

from gateway.api.openai_items import items_of
from gateway.errors import UnknownObject
from gateway.http.body import LARGE_BODY_BYTES, MemoryBudget
from gateway.responses.messages import Found, Key, Messages, Placed, Sealed, Unreadable
from gateway.responses.usage import TenantUsages
from gateway.settings import ResponseSettings
from ledger.payloads.sealing import Sealer
from protocol import wire
from protocol.errors import BusError, StreamFull
from protocol.nats.bus import Bus
from protocol.process import backoff_s
from protocol.wire import UNDECODABLE

log = logging.getLogger(__name__)


# --- patience ---------------------------------------------------------------------------------------------------------
#
# Retries while the queue server is unavailable, so that requests do not fail.

PATIENCE_S: Final = 10.0
LONGEST_WAIT_S: Final = 1.0

_Answer = TypeVar("_Answer")


async def retry_bus(ask: Callable[[], Awaitable[_Answer]], limit_s: float = PATIENCE_S) -> _Answer:
    """Retry until there is a result. Raises the last BusError after ``limit_s``, and StreamFull immediately."""
    until_s = time.monotonic() + limit_s
    for wait_s in backoff_s(LONGEST_WAIT_S):
        try:
            return await ask()
        except StreamFull:
            raise
        except BusError:
            if time.monotonic() + wait_s >= until_s:
                raise
        await asyncio.sleep(wait_s)
    raise AssertionError("unreachable")


# --- records ----------------------------------------------------------------------------------------------------------
#
# Messages of the stream RES. All are sealed (``ledger.payloads.sealing``).


class Run(Struct, frozen=True):
    """A running background response, with everything that another gateway needs to continue it."""

    v: int
    owner: str  # the gateway that runs it; empty: none
    response_id: str
    tenant: str
    team_id: str
    key_id: str
    received_unix_ms: int
    body: bytes  # of the request, with the whole conversation
    response: bytes  # initial response: JSON
    tries: int = 0  # failed attempts, including lost gateways
    reason: str = ""  # reason of the last failure


class EventsPart(Struct, frozen=True):
    """The next events of a background response, and the frames behind them.

    A part without events marks a takeover: it fences out the previous gateway.
    """

    v: int
    owner: str
    attempt: int  # current attempt of the request
    revision: str  # protocol.job.Accepted.revision of the worker that generated the tokens
    first: int  # number of the first event
    count: int  # of the events
    events: bytes
    frames: tuple[bytes, ...] = ()  # Tokens and Deltas, encoded by protocol.job.encode
    response: bytes = b""  # JSON; with the final event: the final response

    @property
    def is_last(self) -> bool:
        """True if it has the final event."""
        return bool(self.response)


class StoredResponse(Struct, frozen=True):
    """An ended response and its conversation."""

    v: int
    response: bytes  # JSON
    items: bytes  # JSON: input items, including earlier responses; empty: too large to store


class Question(Struct, frozen=True, array_like=True):
    """Ask a gateway which of these background responses it runs; the reply is the list of those."""

    response_ids: tuple[str, ...]


encode: Final = msgspec.msgpack.Encoder().encode
_run_decoder = msgspec.msgpack.Decoder(Run)
_part_decoder = msgspec.msgpack.Decoder(EventsPart)
_stored_decoder = msgspec.msgpack.Decoder(StoredResponse)
_question_decoder = msgspec.msgpack.Decoder(Question)


def decode_run(payload: bytes) -> Run:
    """Decode a Run. Raises ProtocolError."""
    return wire.decode_versioned(_run_decoder, payload, "background response")


def decode_part(payload: bytes) -> EventsPart:
    """Decode an EventsPart. Raises ProtocolError."""
    return wire.decode_versioned(_part_decoder, payload, "events of a response")


def decode_stored(payload: bytes) -> StoredResponse:
    """Decode a StoredResponse. Raises ProtocolError."""
    return wire.decode_versioned(_stored_decoder, payload, "stored response")


def decode_question(payload: bytes) -> Question:
    """Decode a Question. Raises ProtocolError."""
    return wire.decode(_question_decoder, payload, "question")


# --- kept -------------------------------------------------------------------------------------------------------------
#
# A stored response in any state, as clients see it. Pure; JSON stays mostly unparsed.

FIRST_EVENTS: Final = 2  # created and queued

_encode = msgspec.json.Encoder().encode


class State(msgspec.Struct, frozen=True):
    """The state of a response."""

    status: str
    background: bool


class _Identity(msgspec.Struct, frozen=True):
    id: str


_decode_state: Final = msgspec.json.Decoder(State).decode
_decode_identities: Final = msgspec.json.Decoder(list[_Identity]).decode


class ItemsPage(msgspec.Struct, frozen=True):
    """A page of input items in stored form."""

    data: list[msgspec.Raw]
    first_id: str | None
    last_id: str | None
    has_more: bool
    object: str = "list"


class Kept:
    """A response. Its methods raise MsgspecError if the stored data is invalid."""

    def __init__(self, response: bytes, items: bytes, run: Run | None = None, last: EventsPart | None = None) -> None:
        self._response = response
        self._items = items
        self._run = run
        self._last = last

    @classmethod
    def of_run(cls, run: Run, last: EventsPart | None) -> "Kept":
        """Return a running background response. ``last``: the last part of its events."""
        return cls(last.response if last is not None and last.is_last else run.response, b"", run, last)

    @classmethod
    def of_end(cls, stored: StoredResponse) -> "Kept":
        """Return an ended response."""
        return cls(stored.response, stored.items)

    @property
    def is_over(self) -> bool:
        """True if it has ended."""
        return self._run is None or (self._last is not None and self._last.is_last)

    @property
    def state(self) -> State:
        """State of the response."""
        return _decode_state(self.answer)

    @property
    def answer(self) -> bytes:
        """Return the public response: JSON."""
        has_begun = self._last is not None and self._last.first + self._last.count > FIRST_EVENTS
        if self.is_over or not has_begun:
            return self._response
        fields = msgspec.json.decode(self._response, type=dict[str, msgspec.Raw])
        return _encode({**fields, "status": "in_progress"})

    @property
    def items(self) -> bytes:
        """Input items: JSON; empty if they were too large to store."""
        return self._items if self._run is None else items_of(self._run.body, answer_id_of(self._run.response_id))

    def page(self, after: str | None, limit: int, order: Literal["asc", "desc"]) -> bytes:
        """Return a page of input items: JSON. Raises UnknownObject if no item has the id ``after``."""
        listed = self.items or b"[]"
        items = msgspec.json.decode(listed, type=list[msgspec.Raw])
        ids = [item.id for item in _decode_identities(listed)]
        if order == "desc":
            items.reverse()
            ids.reverse()
        begin = 0
        if after is not None:
            if after not in ids:
                raise UnknownObject(f"No input item with id '{after[:100]}'.", param="after")
            begin = ids.index(after) + 1
        end = min(begin + limit, len(ids))
        first, last = (ids[begin], ids[end - 1]) if end > begin else (None, None)
        return _encode(ItemsPage(items[begin:end], first, last, end < len(ids)))


def answer_id_of(response_id: str) -> str:
    return response_id.removeprefix("resp_")


# --- shares -----------------------------------------------------------------------------------------------------------
#
# Reads for clients, within each tenant's share of memory and threads.

MAX_OPENED_BODIES: Final = 2  # a stored response opens to this many times max_body_bytes: conversation and response
MAX_OPENED_PART_BODIES: Final = 4  # a part of events may contain a response three times
MAX_READ_BODIES: Final = MAX_OPENED_BODIES + MAX_OPENED_PART_BODIES  # opened at the same time

_Result = TypeVar("_Result")


class Shares(Protocol):
    """Memory and threads for reads of clients."""

    def room(self, tenant: str, size_bytes: int) -> AbstractAsyncContextManager[None]:
        """Hold memory. Raises Overloaded if it is not free in time."""
        ...

    async def run(self, tenant: str, size_bytes: int, work: Callable[[], _Result]) -> _Result:
        """Run work that reads this many bytes. Raises RateLimitExceeded or Overloaded."""
        ...


class Threads(Protocol):
    """Threads shared between tenants: ``gateway.tokenizing.encoder_pool.EncoderPool``."""

    def run(self, tenant: str, size_bytes: int, work: Callable[[], Any], *, is_quick: bool) -> Awaitable[Any]:
        """Run ``work``. Raises RateLimitExceeded or Overloaded."""
        ...


class ReadShares:
    """The ``Shares`` of a gateway."""

    def __init__(self, max_bytes: int, max_body_bytes: int, limit_s: float, threads: Threads) -> None:
        """``limit_s``: maximum wait of a read for memory."""
        self._room = MemoryBudget(
            max(max_bytes, 2 * MAX_READ_BODIES * max_body_bytes), limit_s
        )  # otherwise one read would never fit
        self._threads = threads

    def room(self, tenant: str, size_bytes: int) -> AbstractAsyncContextManager[None]:
        """Implement ``Shares``."""
        return self._room.held(tenant, size_bytes, "the stored response")

    async def run(self, tenant: str, size_bytes: int, work: Callable[[], _Result]) -> _Result:
        """Implement ``Shares``: use a thread if it is large."""
        if size_bytes <= LARGE_BODY_BYTES:
            return work()
        result: _Result = await self._threads.run(tenant, size_bytes, work, is_quick=True)
        return result


# --- store ------------------------------------------------------------------------------------------------------------

RUN_TTL_S: Final = 48 * 3600  # longer than any run: an abandoned run expires
HELD_FOR_EVENTS_BYTES: Final = 64 * 1024  # initial reservation for the events of a background response
_ALL: Final = "res.*.*.run"


_View = TypeVar("_View")


class ResponseStore:
    """Reads and writes the stream. Methods raise BusError; reading methods also raise ProtocolError."""

    def __init__(
        self, bus: Bus, settings: ResponseSettings, sealer: Sealer, *, max_body_bytes: int, shares: Shares
    ) -> None:
        self.max_body_bytes = max_body_bytes  # of a request, and of a continued conversation
        self._bus = bus
        self._settings = settings
        self._messages = Messages(bus, sealer, settings.max_response_bytes)
        self._usages = TenantUsages(self._messages, settings)
        self._shares = shares
        self._max_bytes = MAX_OPENED_BODIES * max_body_bytes  # decompressed size of a run or a stored response
        self._max_part_bytes = MAX_OPENED_PART_BODIES * max_body_bytes

    # --- responses in the background ----------------------------------------------------------------------------------

    async def begin(self, run: Run) -> int:
        """Store a new run, and reserve ``HELD_FOR_EVENTS_BYTES``; return its size. Raises NotKept."""
        key = Key(run.tenant, run.response_id)
        sealed = await self._messages.sealed(encode(run), key, "request", self._max_bytes)
        held_bytes = len(sealed.payload) + HELD_FOR_EVENTS_BYTES
        await self._usages.take(key.tenant, held_bytes)
        await self._usages.mark(key, held_bytes, ttl_s=RUN_TTL_S)
        await self._messages.set(key, "run", sealed, 0, ttl_s=RUN_TTL_S)
        return len(sealed.payload)

    async def hold(self, key: Key, before_bytes: int, size_bytes: int) -> None:
        """Replace the size reserved for a running response."""
        await self._usages.mark(key, size_bytes, ttl_s=RUN_TTL_S)
        self._usages.add(key.tenant, 0, size_bytes - before_bytes)

    async def own(self, key: Key, run: Run, sequence: int) -> Placed | None:
        """Replace a run by its sequence number; return its place. None: another gateway was faster."""
        sealed = await self._messages.sealed_again(encode(run), key, "request")
        found = await self._messages.set(key, "run", sealed, sequence, ttl_s=RUN_TTL_S)
        if found is None:
            return None
        try:
            await self._messages.purge(key, "run", keep=1)
        except BusError as error:  # its next owner deletes it
            log.warning("an older run of response %s could not be deleted: %s", key.response_id, error)
        return Placed(found, len(sealed.payload))

    async def run_of(self, key: Key) -> tuple[Run, int] | None:
        """Return the run of a response, and its sequence number; None: it is not running."""
        found = await self._messages.last(key, "run")
        if found is None:
            return None
        return decode_run(await self._messages.opened(found, key, "request", self._max_bytes)), found.sequence

    async def is_made(self, key: Key) -> bool:
        """Return whether a response has a run."""
        return await self._messages.last(key, "run") is not None

    async def running(self) -> list[Key]:
        """Return the running responses of all gateways."""
        subjects_found = await self._messages.count(_ALL)
        return [Key.of(subject) for subject in subjects_found]

    async def forget_run(self, key: Key) -> None:
        """Delete the run of an ended response."""
        await self._messages.purge(key, "run")

    async def add_part(self, key: Key, part: EventsPart, last_sequence: int) -> Placed | None:
        """Add events after the part with this sequence; return their place. None: another gateway has taken over.

        Raises NotKept.
        """
        sealed = await self._messages.sealed(encode(part), key, "answer", self._max_part_bytes)
        sequence = await self._messages.set(key, "events", sealed, last_sequence, ttl_s=int(self._settings.events_s))
        if sequence is not None:
            return Placed(sequence, len(sealed.payload))
        last = await self._messages.last(key, "events")  # it may be this one: stored, but the reply was lost
        if last is None or decode_part(await self._messages.opened(last, key, "answer", self._max_part_bytes)) != part:
            return None
        return Placed(last.sequence, last.size_bytes)

    async def parts(self, key: Key, after_sequence: int = 0) -> AsyncIterator[tuple[EventsPart, Placed]]:
        """Iterate over the stored parts with their places."""
        while (found := await self._messages.next(key, "events", after_sequence)) is not None:
            after_sequence = found.sequence
            part = decode_part(await self._messages.opened(found, key, "answer", self._max_part_bytes))
            yield part, Placed(found.sequence, found.size_bytes)

    async def has_part(self, key: Key, after_sequence: int) -> bool:
        """Return whether there is a later part."""
        return await self._messages.next(key, "events", after_sequence) is not None

    async def events(self, key: Key, after_sequence: int) -> AsyncGenerator[tuple[EventsPart, int], None]:
        """Iterate over the parts for a client, within its tenant's share. Also raises the errors of ``Shares``."""
        while True:
            async with self._shares.room(key.tenant, self._max_part_bytes):
                found = await self._messages.next(key, "events", after_sequence)
                if found is None:
                    return
                after_sequence, size_bytes = found.sequence, found.most_bytes(self._max_part_bytes)
                part = await self._shares.run(key.tenant, size_bytes, partial(self._open_part, found, key))
            async with self._shares.room(key.tenant, size_bytes):
                yield part, after_sequence

    @asynccontextmanager
    async def listening(self, key: Key) -> AsyncIterator[asyncio.Event]:
        """Set the event when a part may have been added."""
        added = asyncio.Event()

        async def on_part(_message: Msg) -> None:
            added.set()

        subscription = await self._bus.subscribe(self._messages.subject(key, "events"), on_part)
        try:
            yield added
        finally:
            if self._bus.connected:
                await subscription.unsubscribe()

    async def cancel(self, key: Key) -> None:
        """Request the cancellation of a response."""
        await self._messages.mark(key, "cancel", ttl_s=RUN_TTL_S)

    async def is_cancelled(self, key: Key) -> bool:
        """Return whether cancellation was requested."""
        return await self._messages.last(key, "cancel") is not None

    async def on_cancel(self, handle: Callable[[Key], None]) -> None:
        """Call back for each cancellation request."""

        async def on_message(message: Msg) -> None:
            handle(Key.of(message.subject))

        await self._bus.subscribe("res.*.*.cancel", on_message)

    # --- responses that have ended ------------------------------------------------------------------------------------

    async def put(self, key: Key, stored: StoredResponse) -> None:
        """Store an ended response. Raises NotKept, including TenantFull."""
        sealed = await self._messages.sealed(encode(stored), key, "answer", self._max_bytes)
        size_bytes = len(sealed.payload)
        await self._usages.take(key.tenant, size_bytes)
        try:
            await self._put_end(key, sealed)
        except BaseException:
            self._usages.add(key.tenant, -1, -size_bytes)
            raise

    async def end(self, key: Key, stored: StoredResponse, events_bytes: int) -> None:
        """Store an ended background response, whose space is already reserved. Raises NotKept."""
        await self._put_end(key, await self._messages.sealed(encode(stored), key, "answer", self._max_bytes))
        await self._messages.purge(key, "size.*")
        await self._usages.mark(key, events_bytes, ttl_s=int(self._settings.events_s))

    async def _put_end(self, key: Key, sealed: Sealed) -> None:
        await self._messages.put(key, f"done.{sealed.size_kib}", sealed, ttl_s=int(self._settings.keep_s))

    async def why_full(self, tenant: str) -> str | None:
        """Return why a tenant may not store another response; None: it may."""
        return await self._usages.why_full(tenant)

    async def has_ended(self, key: Key) -> bool:
        """Return whether an ended response is stored."""
        return await self._messages.last(key, "done.*") is not None

    async def delete(self, key: Key) -> None:
        """Delete all messages of a response."""
        await self._messages.purge(key, ">")
        self._usages.forget(key.tenant)

    # --- for callers --------------------------------------------------------------------------------------------------

    async def read(self, key: Key, view: Callable[[Kept], _View]) -> _View | None:
        """Return the result of ``view`` for a stored response, within its tenant's share; None: not found.

        Raises Unreadable, and the errors of ``Shares`` and ``view`` except MsgspecError.
        """
        async with self._shares.room(key.tenant, self._max_bytes + self._max_part_bytes):
            # It may end between the reads.
            found = await self._running(key) or await self._ended(key) or await self._running(key)
            if found is None:
                return None
            size_bytes, opened = found

            def work() -> _View:
                try:
                    return view(opened())
                except UNDECODABLE as error:
                    raise Unreadable(f"the stored data of {key.response_id} cannot be read: {error}") from error

            return await self._shares.run(key.tenant, size_bytes, work)

    async def _running(self, key: Key) -> tuple[int, Callable[[], Kept]] | None:
        run = await self._messages.last(key, "run")
        if run is None:
            return None
        last = await self._messages.last(key, "events")

        def opened() -> Kept:
            found = decode_run(self._messages.open(run, key, "request", self._max_bytes))
            part = None if last is None else self._open_part(last, key)
            return Kept.of_run(found, part)

        size_bytes = run.most_bytes(self._max_bytes)
        return size_bytes + (0 if last is None else last.most_bytes(self._max_part_bytes)), opened

    async def _ended(self, key: Key) -> tuple[int, Callable[[], Kept]] | None:
        found = await self._messages.last(key, "done.*")
        if found is None:
            return None
        return found.most_bytes(self._max_bytes), lambda: Kept.of_end(
            decode_stored(self._messages.open(found, key, "answer", self._max_bytes))
        )

    def _open_part(self, found: Found, key: Key) -> EventsPart:
        return decode_part(self._messages.open(found, key, "answer", self._max_part_bytes))
