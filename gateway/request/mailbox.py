"""The mailbox between one request's frames and the coroutine that writes its answer.

A reader that keeps up gets the frames as they arrived. Unread frames, and all of a whole answer, are kept encoded: this
takes a seventh of the memory for frames with log-probabilities, and the size is known exactly. ``UnreadBytes`` bounds
the bytes of each tenant and of the gateway.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

import msgspec
from msgspec import Struct

from gateway.errors import Failure
from protocol.generation import PromptLogprob, TokenLogprob
from protocol.job import Deltas, Tokens, Vector, encode


class Chunks(Protocol):
    """Encodes one request's frames as events."""

    def of(self, frame: Tokens | Deltas) -> bytes:
        """Return the events of one frame, possibly none."""
        ...

    def usage(self, usage: dict[str, Any], attempts: int) -> bytes:
        """Return the final chunk of a stream with usage, and the number of attempts if more than one."""
        ...


# --- unread -----------------------------------------------------------------------------------------------------------
#
# Bytes of unread answers at this gateway, by tenant.

TENANT_SHARE: Final = 4  # one tenant may use 1/TENANT_SHARE of the limit


class Keeper(Protocol):
    """Holder of the bytes: a mailbox."""

    held_bytes: int


@dataclass(slots=True)
class _Tenant:
    held_bytes: int = 0
    keepers: dict[Keeper, Callable[[], None]] = field(default_factory=dict)  # with the callback that frees its bytes


class UnreadBytes:
    """Bounds the unread bytes at this gateway: beyond a bound, the largest keeper is given up."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._held_bytes = 0
        self._tenants: dict[str, _Tenant] = {}

    @property
    def held_bytes(self) -> int:
        """Unread bytes over all tenants."""
        return self._held_bytes

    def count(self, tenant: str, keeper: Keeper, give_up: Callable[[], None], count_bytes: int) -> None:
        """Count a change of a keeper's bytes; ``give_up`` makes it free its bytes."""
        held = self._tenants.get(tenant)
        if held is None:
            held = self._tenants[tenant] = _Tenant()
        held.held_bytes += count_bytes
        self._held_bytes += count_bytes
        if keeper.held_bytes:
            held.keepers[keeper] = give_up
        else:
            held.keepers.pop(keeper, None)
        if not held.keepers:
            del self._tenants[tenant]
        if count_bytes > 0:
            self._keep_bounds(held)

    def _keep_bounds(self, held: _Tenant) -> None:
        if held.held_bytes > self._max_bytes // TENANT_SHARE:
            _give_up_largest(held)
        elif self._held_bytes > self._max_bytes:
            _give_up_largest(max(self._tenants.values(), key=lambda tenant: tenant.held_bytes))


def _give_up_largest(held: _Tenant) -> None:
    held.keepers[max(held.keepers, key=lambda keeper: keeper.held_bytes)]()


# --- mailbox ----------------------------------------------------------------------------------------------------------

MAX_UNREAD_BYTES: Final = 4 * 1024 * 1024  # of one request, before a slow client is given up
LOOSE_EVENTS: Final = 64  # kept as objects
TAKEN_AT_ONCE: Final = 32  # encoded events; about 2 ms of decoding with log-probabilities
PACKED_OVERHEAD_BYTES: Final = 48  # per encoded event
_NIL: Final = b"\xc0"


class Ended(Struct, frozen=True):
    """The last event of every request."""

    failure: Failure | None = None


class StillWaiting(Struct, frozen=True):
    """A keep-alive after a period without other events."""

    state: str  # "queued" | "running"


Event = Tokens | Deltas | Vector | StillWaiting | Ended


class HeldTokens(Struct, frozen=True, array_like=True, tag="t"):
    """``Tokens`` with log-probabilities still encoded, since only these are large."""

    request_id: str
    attempt: int
    seq: int
    index: int
    token_ids: tuple[int, ...]
    text: str
    finish_reason: str | None = None
    logprobs: msgspec.Raw = msgspec.Raw(_NIL)  # immutable
    prompt_logprobs: tuple[PromptLogprob, ...] | None = None

    @property
    def held_logprobs(self) -> msgspec.Raw | None:
        """The log-probabilities, if any."""
        return None if bytes(self.logprobs) == _NIL else self.logprobs


AnyTokens = Tokens | HeldTokens | Deltas
HeldLogprobs = tuple[TokenLogprob, ...] | msgspec.Raw

_decode_tokens: Callable[[bytes], Tokens | Deltas] = msgspec.msgpack.Decoder(Tokens | Deltas).decode
_decode_held: Callable[[bytes], HeldTokens | Deltas] = msgspec.msgpack.Decoder(HeldTokens | Deltas).decode
_decode_logprobs = msgspec.msgpack.Decoder(tuple[TokenLogprob, ...] | None).decode


def read_logprobs(held: HeldLogprobs | None) -> tuple[TokenLogprob, ...]:
    """Return the log-probabilities of a frame's tokens, decoding them if necessary."""
    return (_decode_logprobs(held) if isinstance(held, msgspec.Raw) else held) or ()


class ReaderCut(Exception):
    """Raised when the unread events of a slow reader were dropped."""


def _do_nothing() -> None:
    """Do nothing, for a mailbox without a reader."""


class Mailbox:
    """Events in order, for one reader.

    ``put`` and ``wake`` are separate so that all frames of one engine step cause one wake-up and one HTTP write.
    """

    max_unread_bytes = MAX_UNREAD_BYTES

    def __init__(self) -> None:
        self.held_bytes = 0  # of encoded events
        self.on_cut: Callable[[], None] | None = None  # called when events that the reader still wants are dropped
        self._events: list[Event] = []
        self._packed: deque[bytes | Event] = deque()  # later events
        self._is_cut = False
        self._unread: UnreadBytes | None = None
        self._tenant = ""
        self._give_up: Callable[[], None] = _do_nothing
        self._waiter: asyncio.Future[None] | None = None

    def __len__(self) -> int:
        return len(self._events) + len(self._packed)

    def count_in(self, unread: UnreadBytes, tenant: str, give_up: Callable[[], None]) -> None:
        """Count encoded events in ``unread``; ``give_up`` is called when they exceed a bound."""
        self._unread, self._tenant, self._give_up = unread, tenant, give_up

    def put(self, event: Event) -> None:
        """Add an event without waking the reader."""
        if len(self._events) < LOOSE_EVENTS and not self._packed:
            self._events.append(event)
        else:
            self._pack(event)

    def put_tokens(self, frame: Tokens | Deltas) -> None:
        """Add a frame without waking the reader. Encode one with log-probabilities unless a reader waits."""
        is_large = frame.logprobs is not None or frame.prompt_logprobs is not None
        if is_large and (self._waiter is None or self._events or self._packed):
            self._pack(frame)
        else:
            self.put(frame)

    def _pack(self, event: Event) -> None:
        if not isinstance(event, (Tokens, Deltas)):
            self._packed.append(event)
            return
        packed = encode(event)
        self._packed.append(packed)
        self._count(len(packed) + PACKED_OVERHEAD_BYTES)

    def _count(self, count_bytes: int) -> None:
        self.held_bytes += count_bytes
        if self._unread is not None:
            self._unread.count(self._tenant, self, self._give_up, count_bytes)

    def wake(self) -> None:
        """Let the reader run after the current callback."""
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def clear(self) -> None:
        """Drop the unread events."""
        self._events.clear()
        self._packed.clear()
        if self.held_bytes:
            self._count(-self.held_bytes)

    def close(self) -> None:
        """Drop the unread events and the callback: the reader is gone."""
        self.clear()
        self._give_up = _do_nothing

    def drop(self, request_id: str) -> None:
        """Drop all frames of one request, none of which was read: they will be generated again."""
        self._events = [one for one in self._events if getattr(one, "request_id", None) != request_id]
        packed, self._packed = self._packed, deque()
        for event in packed:
            content = _decode_held(event) if isinstance(event, bytes) else event
            if getattr(content, "request_id", None) != request_id:
                self._packed.append(event)
            elif isinstance(event, bytes):
                self._count(-len(event) - PACKED_OVERHEAD_BYTES)

    def cut(self) -> None:
        """Drop the unread events of a slow reader, except for a failure."""
        last = self._last()
        self.clear()
        if isinstance(last, Ended) and last.failure is not None:
            self._events.append(last)
        else:
            self._is_cut = True
        self.wake()
        if self.on_cut is not None:
            self.on_cut()

    async def take(self) -> list[Event]:
        """Return the next events, at least one; wait for ``wake`` while there is none.

        Raises ReaderCut.
        """
        while not self._events:
            if self._packed:
                return self._unpacked()
            await self._woken()
        events, self._events = self._events, []
        return events

    def _unpacked(self) -> list[Event]:
        events: list[Event] = []
        freed_bytes = 0
        while self._packed and len(events) < TAKEN_AT_ONCE:
            event = self._packed.popleft()
            if isinstance(event, bytes):
                freed_bytes += len(event) + PACKED_OVERHEAD_BYTES
                event = _decode_tokens(event)
            events.append(event)
        if freed_bytes:
            self._count(-freed_bytes)
        return events

    async def wait_for_end(self) -> None:
        """Return once the ``Ended`` has come. Raises ReaderCut."""
        while not isinstance(self._last(), Ended):
            await self._woken()

    def _last(self) -> bytes | Event | None:
        if self._packed:
            return self._packed[-1]
        return self._events[-1] if self._events else None

    async def _woken(self) -> None:
        if not self._is_cut:
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        if self._is_cut:
            raise ReaderCut

    def events(self) -> Iterator[Event | HeldTokens]:
        """Iterate over all events; they stay in the mailbox, and count, until ``clear``."""
        for event in (*self._events, *self._packed):
            yield _decode_held(event) if isinstance(event, bytes) else event

    def tokens(self) -> Iterator[AnyTokens]:
        """Iterate over all tokens in the same way."""
        return (event for event in self.events() if isinstance(event, (Tokens, HeldTokens, Deltas)))


class SharedMailbox(Mailbox):
    """Events of several requests with one answer. Its only ``Ended`` is the first failure, or else the last one.

    A failure cancels the other requests (``gateway.dispatch.stream``), whose later events are dropped.
    """

    def __init__(self, requests: int) -> None:
        super().__init__()
        self.max_unread_bytes = MAX_UNREAD_BYTES * requests
        self._running = requests
        self._has_ended = False

    def put(self, event: Event) -> None:
        """Add an event, unless the mailbox has ended."""
        if isinstance(event, Ended):
            self._running -= 1
            if self._has_ended or (self._running and event.failure is None):
                return
            self._has_ended = True
        elif self._has_ended or (isinstance(event, StillWaiting) and self._is_last_a_sign_of_life()):
            return
        super().put(event)

    def put_tokens(self, frame: Tokens | Deltas) -> None:
        """Add a frame, unless the mailbox has ended."""
        if not self._has_ended:
            super().put_tokens(frame)

    def _is_last_a_sign_of_life(self) -> bool:
        return bool(self._events) and isinstance(self._events[-1], StillWaiting)
