"""From the frames of one request to the coroutine that writes its answer."""

import asyncio
from typing import Final

from msgspec import Struct

from protocol.errors import ErrorCode
from protocol.messages import Tokens, Vector

MAX_UNREAD_EVENTS: Final = 8192  # frames a slow client may lag behind before its request is given up


class Failure(Struct, frozen=True):
    """Why a request was refused or ended without an answer."""

    code: ErrorCode
    message: str
    param: str | None = None
    retry_after_s: int | None = None  # where something better is known than the code's own
    is_wanted: bool = False  # the caller has asked to be refused: its client shall not try again by itself


class Ended(Struct, frozen=True):
    """The last event of every request."""

    failure: Failure | None = None


class StillWaiting(Struct, frozen=True):
    """Nothing was sent for a while: time for a sign of life."""

    state: str  # "queued" | "running"


Event = Tokens | Vector | StillWaiting | Ended


class Mailbox:
    """Events in order, for one reader, which takes all that have come since it last looked.

    ``put`` and ``wake`` are separate so that all frames of one engine step make one wake-up and one HTTP write.
    """

    max_unread = MAX_UNREAD_EVENTS

    def __init__(self) -> None:
        self._events: list[Event] = []
        self._waiter: asyncio.Future[None] | None = None

    def __len__(self) -> int:
        return len(self._events)

    def put(self, event: Event) -> None:
        """Add an event without waking the reader."""
        self._events.append(event)

    def wake(self) -> None:
        """Let the reader run once the current callback is over."""
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def clear(self) -> None:
        """Throw away what is unread."""
        self._events.clear()

    async def take(self) -> list[Event]:
        """Wait for ``wake``, unless there is something already; returns all that is there, at least one event."""
        while not self._events:
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        events, self._events = self._events, []
        return events


class SharedMailbox(Mailbox):
    """Events of several requests that are answered together. Its one ``Ended`` is the first failure, or else the last.

    Whoever fails has the others cancelled (``gateway.dispatch.group``): what these still put is dropped.
    """

    def __init__(self, requests: int) -> None:
        super().__init__()
        self.max_unread = MAX_UNREAD_EVENTS * requests
        self._running = requests
        self._has_ended = False

    def put(self, event: Event) -> None:
        """See Mailbox."""
        if isinstance(event, Ended):
            self._running -= 1
            if self._has_ended or (self._running and event.failure is None):
                return
            self._has_ended = True
        elif self._has_ended or (isinstance(event, StillWaiting) and self._is_last_a_sign_of_life()):
            return
        super().put(event)

    def _is_last_a_sign_of_life(self) -> bool:
        return bool(self._events) and isinstance(self._events[-1], StillWaiting)
