"""Responses in the background: each runs apart from its client, into the stream RES, and outlives its gateway.

    POST, background ──> stored as ours ──> admitted request ──> events, stored part by part ──> stored as ended
                                                  │
       its gateway leaves, or is gone ──> another takes it over: it replays what is stored, and goes on from there

What a reader gets is what is stored, so whoever goes on makes the same beginning again: the frames are encoded anew,
and what is there already is not stored twice.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any, Final, Protocol

import msgspec
from msgspec import structs

from gateway.api.openai_items import items_of
from gateway.api.openai_responses import ended_at, fault
from gateway.errors import Refused
from gateway.request.request import PartialAnswer
from gateway.responses.messages import THREADED_BYTES, Key, NotKept
from gateway.responses.reading import EVENT_END
from gateway.responses.store import EventsPart, ResponseStore, Run, StoredResponse, answer_id_of, patiently
from protocol.errors import BusError, ProtocolError
from protocol.job import Deltas, Tokens
from protocol.job import encode as encode_frame
from protocol.wire import PROTOCOL_VERSION, UNDECODABLE

PENDING_BYTES: Final = 1024 * 1024  # that are not stored yet: from here on the answer is not read on
PART_BYTES: Final = 256 * 1024  # of events and frames in one part, but for one frame's
MAX_REASON_CHARS: Final = 500
HELD_GROWTH: Final = 2  # events that outgrow what is counted for them are counted as so many times as large
STORE_PATIENCE_S: Final = 60.0  # then somebody else may try

# What a response that is too large for its end does not repeat of its request.
_FORGOTTEN: Final[dict[str, Any]] = {
    "instructions": None, "metadata": {}, "tools": [], "tool_choice": "auto", "text": {"format": {"type": "text"}},
}  # fmt: skip

log = logging.getLogger(__name__)
_encode = msgspec.json.Encoder().encode
_decode_frame: Final[Callable[[bytes], Tokens | Deltas]] = msgspec.msgpack.Decoder(Tokens | Deltas).decode


class Call(Protocol):
    """The call of a response, which records its events here."""

    def error_event(self, error: Refused) -> bytes:
        """Record that it has failed."""
        ...

    def cancelled(self) -> None:
        """Record that it was cancelled."""
        ...


class Choices(Protocol):
    """Answers of a request."""

    revision: str


class Request(Protocol):
    """The request of a response."""

    @property
    def attempt(self) -> int:
        """Number of the attempt that is under way."""
        ...

    @property
    def choices(self) -> Choices:
        """Its answers."""
        ...


class Lost(Exception):
    """Another gateway goes on with the response."""


class Pending(msgspec.Struct):
    """Events that are not stored yet, and the frame that they were made of."""

    frame: bytes  # empty: none
    events: bytes
    count: int  # of the events
    response: bytes

    @property
    def size(self) -> int:
        """Bytes."""
        return len(self.frame) + len(self.events) + len(self.response)


class BackgroundRun:
    """One response in the background, at the gateway that makes it. Only the event loop touches it."""

    def __init__(self, store: ResponseStore, run: Run, owner: str) -> None:
        self.run = run
        self.key = Key(run.tenant, run.response_id)
        self.call: Call | None = None  # once it is admitted
        self.request: Request | None = None  # likewise
        self.gone = asyncio.Event()  # its request is to be stopped
        self.made: PartialAnswer | None = None  # by other gateways
        self.is_handed_over = False
        self.response = b""  # JSON, once the last event is stored
        self.problem: NotKept | None = None  # why it is not made here any longer, where that is its own fault
        self.events_bytes = 0  # that its parts take
        self.run_bytes = 0  # that its run takes
        self.held_bytes = 0  # that are counted for all of it
        self._store = store
        self._owner = owner
        self._sequence = 0  # of the last part
        self._stored_events = 0  # as many are stored
        self._made_frames = 0  # of these, as many are replayed
        self._events = 0  # as many have been encoded here
        self._frames = 0
        self._has_last = False
        self._pending: deque[Pending] = deque()
        self._pending_events = 0
        self._pending_bytes = 0
        self._changed = asyncio.Event()
        self._storing: asyncio.Task[None] | None = None

    # --- what is there ------------------------------------------------------------------------------------------------

    async def begin(self, events: bytes) -> None:
        """Store the first events. Raises Lost, BusError and NotKept."""
        count = events.count(EVENT_END)
        await self._add(EventsPart(PROTOCOL_VERSION, self._owner, 0, "", 0, count, events))
        self._stored_events = count

    async def read(self, *, with_frames: bool = True) -> None:
        """Read what other gateways have stored. Raises BusError and ProtocolError.

        ``with_frames``: also those that its answer is made of, to go on with it.
        """
        frames: list[Tokens | Deltas] = []
        attempt, revision = 0, ""
        async for part, placed in self._store.parts(self.key, self._sequence):
            self._sequence, self._stored_events = placed.sequence, part.first + part.count
            self.events_bytes += placed.size_bytes
            if with_frames:
                frames += [_decoded_frame(frame) for frame in part.frames]
            attempt, revision = max(attempt, part.attempt), part.revision or revision
            self.response = part.response or self.response
        before = self.made or PartialAnswer()
        self.made = PartialAnswer((*before.frames, *frames), max(before.attempt, attempt), revision or before.revision)
        self._made_frames = len(self.made.frames)

    async def claim(self) -> None:
        """Keep whoever had it before from adding anything. Raises Lost, BusError and NotKept."""
        await self._add(EventsPart(PROTOCOL_VERSION, self._owner, 0, "", self._stored_events, 0, b""))

    # --- EventRecorder ------------------------------------------------------------------------------------------------

    def add(self, frame: Tokens | Deltas | None, events: bytes, response: dict[str, Any] | None = None) -> None:
        """Implement ``EventRecorder``; what is stored already is passed over."""
        if self._has_last:
            return
        self._has_last = response is not None
        self._frames += frame is not None
        count = events.count(EVENT_END)
        self._events += count
        if frame is None and self._events <= self._stored_events + self._pending_events:
            return
        if frame is not None and self._frames <= self._made_frames:
            return
        packed = b"" if frame is None else encode_frame(frame)
        self._pending.append(Pending(packed, events, count, b"" if response is None else _encode(response)))
        self._pending_events += count
        self._pending_bytes += self._pending[-1].size
        if self._storing is None:
            self._storing = asyncio.create_task(self._keep_storing())

    async def room(self) -> None:
        """Wait until more may be added. Raises Lost."""
        await self._until_pending(PENDING_BYTES)

    async def flush(self) -> None:
        """Wait until all is stored. Raises Lost."""
        await self._until_pending(0)

    async def _until_pending(self, most_bytes: int) -> None:
        while self._pending_bytes > most_bytes:
            if self._storing is None or self._storing.done():
                raise Lost
            self._changed.clear()
            changed = asyncio.create_task(self._changed.wait())
            await asyncio.wait({self._storing, changed}, return_when=asyncio.FIRST_COMPLETED)
            changed.cancel()

    async def _keep_storing(self) -> None:
        try:
            while self._pending:
                await self._store_some()
        except (Lost, BusError, NotKept) as error:
            log.warning(
                "response %s now runs on another gateway: %s", self.key.response_id, str(error) or "it was taken over"
            )
            self.problem = error if isinstance(error, NotKept) else None
            self.stop()
            return
        finally:
            self._changed.set()
        self._storing = None

    async def _store_some(self) -> None:
        taken: list[Pending] = []
        size = 0
        for one in self._pending:
            if taken and size + one.size > PART_BYTES:
                break
            taken.append(one)
            size += one.size
        request, count = self.request, sum(one.count for one in taken)
        part = EventsPart(
            PROTOCOL_VERSION,
            self._owner,
            0 if request is None else request.attempt,
            "" if request is None else request.choices.revision,
            self._stored_events,
            count,
            b"".join(one.events for one in taken),
            tuple(one.frame for one in taken if one.frame),
            taken[-1].response,
        )
        await patiently(partial(self._add, part), STORE_PATIENCE_S)
        for _ in taken:
            self._pending.popleft()
        self._pending_bytes -= size
        self._pending_events -= count
        self._stored_events += count
        self.response = part.response
        self._changed.set()
        await self._hold()

    async def _add(self, part: EventsPart) -> None:
        placed = await self._store.add_part(self.key, part, self._sequence)
        if placed is None:
            raise Lost
        self._sequence = placed.sequence
        self.events_bytes += placed.size_bytes

    async def _hold(self) -> None:
        """Count what it takes, where that has outgrown what is counted."""
        size_bytes = self.run_bytes + self.events_bytes
        if size_bytes > self.held_bytes:
            try:
                await self._store.hold(self.key, self.held_bytes, HELD_GROWTH * size_bytes)
            except BusError as error:  # the next part tries again
                log.warning("the size of response %s is not counted yet: %s", self.key.response_id, error)
            else:
                self.held_bytes = HELD_GROWTH * size_bytes

    # --- its end ------------------------------------------------------------------------------------------------------

    def stop(self) -> None:
        """Stop making it here: another gateway goes on."""
        self.is_handed_over = True
        self.gone.set()

    def forget_request(self) -> None:
        """Let go of the call, which records here: in a circle, its body would stay until the collector finds it."""
        self.call = self.request = None

    async def complete(self, failure: Refused | None) -> None:
        """Record an end that nothing was told of yet, and wait until all is stored. Raises Lost.

        ``failure``: why its request has ended without an answer; None: it has one, or was cancelled.
        """
        if self.is_handed_over:
            raise Lost
        if self.call is not None and not self._has_last:
            if failure is not None:
                self.call.error_event(failure)
            else:
                self.call.cancelled()
        await self.flush()

    async def end_unadmitted(self, status: str, error: Refused | None = None) -> None:
        """Record the end of a response that is not admitted again. Raises Lost, BusError and NotKept."""
        response = msgspec.json.decode(self.run.response)
        try:
            await self._end_as(response, status, error)
        except NotKept as reason:
            log.warning("response %s ended; its input could not be stored with it: %s", self.key.response_id, reason)
            await self._end_as({**response, **_FORGOTTEN}, status, error)

    async def _end_as(self, response: dict[str, Any], status: str, error: Refused | None) -> None:
        number = self._stored_events
        events, ended = ended_at(response, number, status, None if error is None else fault(error))
        packed = _encode(ended)
        await self._add(EventsPart(PROTOCOL_VERSION, self._owner, 0, "", number, 1, events, response=packed))
        self.response = packed

    def end_without_events(self, error: Refused) -> None:
        """Make it a response that has failed, where its events cannot be added to."""
        response = {**msgspec.json.decode(self.run.response), **_FORGOTTEN}
        _, ended = ended_at(response, 0, "failed", fault(error))
        self.response = _encode(ended)

    def stored(self, *, with_items: bool = True) -> StoredResponse:
        """Return what is kept of it from now on. Raises MsgspecError where its input is no JSON."""
        items = items_of(self.run.body, answer_id_of(self.key.response_id)) if with_items else b""
        return StoredResponse(PROTOCOL_VERSION, self.response, items)

    async def stored_apart(self) -> StoredResponse:
        """Return the same, made in a thread where it is large."""
        is_large = len(self.run.body) >= THREADED_BYTES
        return await asyncio.to_thread(self.stored) if is_large else self.stored()

    def forget_asked(self) -> None:
        """Leave out of the response what its request has asked for, which may be anything."""
        self.response = _encode({**msgspec.json.decode(self.response), **_FORGOTTEN})


def _decoded_frame(frame: bytes) -> Tokens | Deltas:
    try:
        return _decode_frame(frame)
    except UNDECODABLE as error:
        raise ProtocolError(f"undecodable frame of a response: {error}") from error


def owned(run: Run, owner: str) -> Run:
    """Return the run as another gateway's."""
    return structs.replace(run, owner=owner)


def tried(run: Run, owner: str, reason: str = "") -> Run:
    """Return the run as another gateway's, after a try without an end. ``reason``: why it failed; empty: lost."""
    return structs.replace(run, owner=owner, tries=run.tries + 1, reason=reason or run.reason)
