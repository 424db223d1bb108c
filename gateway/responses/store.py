"""The stream RES: what is kept of responses, each message with a time to live of its own.

    res.<tenant>.<id>.run          Run: while it is made in the background
    res.<tenant>.<id>.events       EventsPart, …: what its readers get, in order
    res.<tenant>.<id>.cancel       empty: it is to be cancelled
    res.<tenant>.<id>.done.<KiB>   StoredResponse
    res.<tenant>.<id>.size.<KiB>   empty: what its run and its events take; the greatest counts

Whoever makes a response owns its ``run``, which others take over by compare and set once that gateway is gone. The
fence is on the events: each part names the sequence number of the last one, so a gateway that has been taken for dead
adds nothing to what another one makes. Sizes stand in subjects, so that the server can count what a tenant has.

What is opened for a caller is opened in the caller's share of memory and threads (``gateway.responses.store``).
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
from gateway.http.body import LARGE_BODY_BYTES, ByteRoom
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
# Waiting for a queue server that is away: what was admitted, or is asked for, need not fail for that.

PATIENCE_S: Final = 10.0
LONGEST_WAIT_S: Final = 1.0

_Answer = TypeVar("_Answer")


async def patiently(ask: Callable[[], Awaitable[_Answer]], limit_s: float = PATIENCE_S) -> _Answer:
    """Ask until there is an answer. Raises the BusError that still stands after ``limit_s``, StreamFull at once."""
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
# What is kept of a response, as messages of the stream RES. All of it is sealed (``ledger.payloads.sealing``).


class Run(Struct, frozen=True):
    """A response that is being made in the background, and whatever another gateway needs to go on with it."""

    v: int
    owner: str  # the gateway that makes it; empty: none
    response_id: str
    tenant: str
    team_id: str
    key_id: str
    received_unix_ms: int
    body: bytes  # of the request, with the whole conversation
    response: bytes  # the response as it was at first: JSON
    tries: int = 0  # that have ended without its end: a gateway was lost with it, or could not make it
    reason: str = ""  # why the last of them has


class EventsPart(Struct, frozen=True):
    """The next events of a response in the background, and what they were made of.

    A part without events says that another gateway goes on: what the one before still tries to add comes too late.
    """

    v: int
    owner: str
    attempt: int  # of the request, that is under way
    revision: str  # protocol.job.Accepted.revision of whoever has made the tokens
    first: int  # number of the first event
    count: int  # of the events
    events: bytes
    frames: tuple[bytes, ...] = ()  # Tokens and Deltas, as protocol.job.encode makes them
    response: bytes = b""  # JSON; with the last event: the response as it is from now on

    @property
    def is_last(self) -> bool:
        """True if it has the last event."""
        return bool(self.response)


class StoredResponse(Struct, frozen=True):
    """A response that has ended, and the conversation that it belongs to."""

    v: int
    response: bytes  # JSON
    items: bytes  # JSON: the input items, those of earlier responses included; empty: too large to be kept


class Question(Struct, frozen=True, array_like=True):
    """Ask a gateway which of these responses it makes in the background; the reply is the list of those."""

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
# What is kept of one response, in whatever state it is, as its callers see it. Pure, and mostly left unparsed.

FIRST_EVENTS: Final = 2  # which say that it is queued

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
    """Some input items, each as it is stored."""

    data: list[msgspec.Raw]
    first_id: str | None
    last_id: str | None
    has_more: bool
    object: str = "list"


class Kept:
    """One response. Its methods raise MsgspecError where something else is stored."""

    def __init__(self, response: bytes, items: bytes, run: Run | None = None, last: EventsPart | None = None) -> None:
        self._response = response
        self._items = items
        self._run = run
        self._last = last

    @classmethod
    def of_run(cls, run: Run, last: EventsPart | None) -> "Kept":
        """Return one that is made in the background. ``last``: the last part of its events."""
        return cls(last.response if last is not None and last.is_last else run.response, b"", run, last)

    @classmethod
    def of_end(cls, stored: StoredResponse) -> "Kept":
        """Return one that has ended."""
        return cls(stored.response, stored.items)

    @property
    def is_over(self) -> bool:
        """True once nothing of it changes."""
        return self._run is None or (self._last is not None and self._last.is_last)

    @property
    def state(self) -> State:
        """Its state."""
        return _decode_state(self.answer)

    @property
    def answer(self) -> bytes:
        """The response as the API shows it: JSON."""
        has_begun = self._last is not None and self._last.first + self._last.count > FIRST_EVENTS
        if self.is_over or not has_begun:
            return self._response
        fields = msgspec.json.decode(self._response, type=dict[str, msgspec.Raw])
        return _encode({**fields, "status": "in_progress"})

    @property
    def items(self) -> bytes:
        """Its input items: JSON; empty where they were too large to be kept."""
        return self._items if self._run is None else items_of(self._run.body, answer_id_of(self._run.response_id))

    def page(self, after: str | None, limit: int, order: Literal["asc", "desc"]) -> bytes:
        """Return some of its input items: JSON. Raises UnknownObject where none has the id ``after``."""
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
    """Return the id of the answer that a response is."""
    return response_id.removeprefix("resp_")


# --- shares -----------------------------------------------------------------------------------------------------------
#
# Where callers read what is stored of their responses: each tenant in its share of memory, and of threads.

MAX_OPENED_BODIES: Final = 2  # a stored response opens to so many times max_body_bytes: its conversation, and itself
MAX_OPENED_PART_BODIES: Final = 4  # a part of events may tell a response twice, and hold it once more
MAX_READ_BODIES: Final = MAX_OPENED_BODIES + MAX_OPENED_PART_BODIES  # that are opened at once

_Result = TypeVar("_Result")


class Shares(Protocol):
    """The memory and the threads in which callers read what is stored."""

    def room(self, tenant: str, size_bytes: int) -> AbstractAsyncContextManager[None]:
        """Hold so much memory. Raises an ApiError where there is none in time."""
        ...

    async def run(self, tenant: str, size_bytes: int, work: Callable[[], _Result]) -> _Result:
        """Do what reads so many bytes. Raises an ApiError where the tenant has too much of it."""
        ...


class Threads(Protocol):
    """Threads that tenants share: ``gateway.tokenizing.encoder_pool.EncoderPool``."""

    def run(self, tenant: str, size_bytes: int, work: Callable[[], Any], *, is_quick: bool) -> Awaitable[Any]:
        """Run ``work``. Raises RateLimitExceeded or Overloaded."""
        ...


class ReadShares:
    """The ``Shares`` of a gateway."""

    def __init__(self, max_bytes: int, max_body_bytes: int, limit_s: float, threads: Threads) -> None:
        """``limit_s``: how long a read waits for room."""
        self._room = ByteRoom(max(max_bytes, 2 * MAX_READ_BODIES * max_body_bytes), limit_s)  # or one would never fit
        self._threads = threads

    def room(self, tenant: str, size_bytes: int) -> AbstractAsyncContextManager[None]:
        """Implement ``Shares``."""
        return self._room.held(tenant, size_bytes, "the stored response")

    async def run(self, tenant: str, size_bytes: int, work: Callable[[], _Result]) -> _Result:
        """Implement ``Shares``: in a thread, where it is large."""
        if size_bytes <= LARGE_BODY_BYTES:
            return work()
        result: _Result = await self._threads.run(tenant, size_bytes, work, is_quick=True)
        return result


# --- store ------------------------------------------------------------------------------------------------------------

RUN_TTL_S: Final = 48 * 3600  # longer than anything may take: a run that nobody can end goes away
HELD_FOR_EVENTS_BYTES: Final = 64 * 1024  # counted for the events of a response in the background before there are any
_ALL: Final = "res.*.*.run"


_View = TypeVar("_View")


class ResponseStore:
    """Reads and writes the stream. Methods raise BusError; those that read raise ProtocolError, too."""

    def __init__(
        self, bus: Bus, settings: ResponseSettings, sealer: Sealer, *, max_body_bytes: int, shares: Shares
    ) -> None:
        self.max_body_bytes = max_body_bytes  # of a request; also of a conversation that is gone on with
        self._bus = bus
        self._settings = settings
        self._messages = Messages(bus, sealer, settings.max_response_bytes)
        self._usages = TenantUsages(self._messages, settings)
        self._shares = shares
        self._max_bytes = MAX_OPENED_BODIES * max_body_bytes  # opened; of a run and of a stored response
        self._max_part_bytes = MAX_OPENED_PART_BODIES * max_body_bytes

    # --- responses in the background ----------------------------------------------------------------------------------

    async def begin(self, run: Run) -> int:
        """Store a new run, and count it with ``HELD_FOR_EVENTS_BYTES``; return what it takes. Raises NotKept."""
        key = Key(run.tenant, run.response_id)
        sealed = await self._messages.sealed(encode(run), key, "request", self._max_bytes)
        held_bytes = len(sealed.payload) + HELD_FOR_EVENTS_BYTES
        await self._usages.take(key.tenant, held_bytes)
        await self._usages.mark(key, held_bytes, ttl_s=RUN_TTL_S)
        await self._messages.set(key, "run", sealed, 0, ttl_s=RUN_TTL_S)
        return len(sealed.payload)

    async def hold(self, key: Key, before_bytes: int, size_bytes: int) -> None:
        """Count so much for a response while it is made, instead of what was counted before."""
        await self._usages.mark(key, size_bytes, ttl_s=RUN_TTL_S)
        self._usages.add(key.tenant, 0, size_bytes - before_bytes)

    async def own(self, key: Key, run: Run, sequence: int) -> Placed | None:
        """Replace a run whose sequence number is known; return where it is. None: somebody else was quicker."""
        sealed = await self._messages.sealed_again(encode(run), key, "request")
        found = await self._messages.set(key, "run", sealed, sequence, ttl_s=RUN_TTL_S)
        if found is None:
            return None
        try:
            await self._messages.purge(key, "run", keep=1)
        except BusError as error:  # whoever owns it next does it
            log.warning("an older run of response %s could not be deleted: %s", key.response_id, error)
        return Placed(found, len(sealed.payload))

    async def run_of(self, key: Key) -> tuple[Run, int] | None:
        """Return the run of a response, and its sequence number; None: it is not being made."""
        found = await self._messages.last(key, "run")
        if found is None:
            return None
        return decode_run(await self._messages.opened(found, key, "request", self._max_bytes)), found.sequence

    async def is_made(self, key: Key) -> bool:
        """Return whether a response has a run."""
        return await self._messages.last(key, "run") is not None

    async def running(self) -> list[Key]:
        """Return all responses that are being made, by whichever gateway."""
        subjects_found = await self._messages.count(_ALL)
        return [Key.of(subject) for subject in subjects_found]

    async def forget_run(self, key: Key) -> None:
        """Remove the run of a response that has ended."""
        await self._messages.purge(key, "run")

    async def add_part(self, key: Key, part: EventsPart, last_sequence: int) -> Placed | None:
        """Add events behind those with this sequence number; return where. None: somebody else goes on.

        Raises NotKept.
        """
        sealed = await self._messages.sealed(encode(part), key, "answer", self._max_part_bytes)
        sequence = await self._messages.set(key, "events", sealed, last_sequence, ttl_s=int(self._settings.events_s))
        if sequence is not None:
            return Placed(sequence, len(sealed.payload))
        last = await self._messages.last(key, "events")  # it may be ours: stored, and only the answer was lost
        if last is None or decode_part(await self._messages.opened(last, key, "answer", self._max_part_bytes)) != part:
            return None
        return Placed(last.sequence, last.size_bytes)

    async def parts(self, key: Key, after_sequence: int = 0) -> AsyncIterator[tuple[EventsPart, Placed]]:
        """Iterate over the parts that are there, each with its place."""
        while (found := await self._messages.next(key, "events", after_sequence)) is not None:
            after_sequence = found.sequence
            part = decode_part(await self._messages.opened(found, key, "answer", self._max_part_bytes))
            yield part, Placed(found.sequence, found.size_bytes)

    async def has_part(self, key: Key, after_sequence: int) -> bool:
        """Return whether there is a part behind this one."""
        return await self._messages.next(key, "events", after_sequence) is not None

    async def events(self, key: Key, after_sequence: int) -> AsyncGenerator[tuple[EventsPart, int], None]:
        """Iterate over them for a caller, in its share; raises what ``Shares`` raise, too."""
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
        """Set the event whenever a part may have been added."""
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
        """Ask whoever makes a response to cancel it."""
        await self._messages.mark(key, "cancel", ttl_s=RUN_TTL_S)

    async def is_cancelled(self, key: Key) -> bool:
        """Return whether that has been asked for."""
        return await self._messages.last(key, "cancel") is not None

    async def on_cancel(self, handle: Callable[[Key], None]) -> None:
        """Call back for each response that is to be cancelled."""

        async def on_message(message: Msg) -> None:
            handle(Key.of(message.subject))

        await self._bus.subscribe("res.*.*.cancel", on_message)

    # --- responses that have ended ------------------------------------------------------------------------------------

    async def put(self, key: Key, stored: StoredResponse) -> None:
        """Store a response that has ended. Raises NotKept, TenantFull among them."""
        sealed = await self._messages.sealed(encode(stored), key, "answer", self._max_bytes)
        size_bytes = len(sealed.payload)
        await self._usages.take(key.tenant, size_bytes)
        try:
            await self._put_end(key, sealed)
        except BaseException:
            self._usages.add(key.tenant, -1, -size_bytes)
            raise

    async def end(self, key: Key, stored: StoredResponse, events_bytes: int) -> None:
        """Store a response that was made in the background and has ended; it has its room already. Raises NotKept."""
        await self._put_end(key, await self._messages.sealed(encode(stored), key, "answer", self._max_bytes))
        await self._messages.purge(key, "size.*")
        await self._usages.mark(key, events_bytes, ttl_s=int(self._settings.events_s))

    async def _put_end(self, key: Key, sealed: Sealed) -> None:
        await self._messages.put(key, f"done.{sealed.size_kib}", sealed, ttl_s=int(self._settings.keep_s))

    async def why_full(self, tenant: str) -> str | None:
        """Return why a tenant may not store another response; None: it may."""
        return await self._usages.why_full(tenant)

    async def has_ended(self, key: Key) -> bool:
        """Return whether a response that has ended is stored."""
        return await self._messages.last(key, "done.*") is not None

    async def delete(self, key: Key) -> None:
        """Remove all that is kept of a response."""
        await self._messages.purge(key, ">")
        self._usages.forget(key.tenant)

    # --- for callers --------------------------------------------------------------------------------------------------

    async def read(self, key: Key, view: Callable[[Kept], _View]) -> _View | None:
        """Return what ``view`` makes of what is kept of a response, in its caller's share; None: nothing is kept.

        Raises Unreadable, and what ``Shares`` and ``view`` raise, MsgspecError aside.
        """
        async with self._shares.room(key.tenant, self._max_bytes + self._max_part_bytes):
            # It may end meanwhile.
            found = await self._running(key) or await self._ended(key) or await self._running(key)
            if found is None:
                return None
            size_bytes, opened = found

            def work() -> _View:
                try:
                    return view(opened())
                except UNDECODABLE as error:
                    raise Unreadable(f"what is kept of {key.response_id} cannot be read: {error}") from error

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
