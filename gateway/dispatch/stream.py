"""The answer to one call: of its one request, or of the several that it was sent as.

Each of several is a request like any other, with its own job, attempts and record. Only what they share is here: all
feed one mailbox, the first that fails has the others cancelled, and its failure is the answer.
"""

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Final, Generic, Protocol

from msgspec.structs import replace

from gateway.dispatch.lifecycle import OpenRequest, State
from gateway.errors import ClientDisconnected, Failure, RequestFailed
from gateway.request.mailbox import AnyTokens, Ended
from gateway.request.request import AnyCall, QueuePosition, Trace
from protocol.job import Vector
from protocol.nats.bus import wait_until_done

ROW_LOOK_S: Final = 0.05  # how soon it is noticed that a request has failed which waits for its intent

log = logging.getLogger(__name__)


class Closing(Protocol):
    """Whoever records requests: the dispatcher."""

    def close(self, request: OpenRequest, http_status: int | None) -> None:
        """Close a request whose answer is done, with the status sent (None: the client disconnected before)."""
        ...

    def hand_over(self, request: OpenRequest) -> None:
        """Stop a request with which another gateway goes on, and which that one records."""
        ...


class AnswerStream(Generic[AnyCall]):
    """What comes of a call. ``close`` must be called once nobody reads any more."""

    def __init__(
        self,
        calls: Sequence[AnyCall],
        requests: Sequence[OpenRequest],
        closing: Closing,
        *,
        trace: Trace | None = None,
        on_close: Callable[[], None] | None = None,
    ) -> None:
        """``requests``: of the calls, just opened. ``trace``: of them together; ``on_close``: is called at the end."""
        self.parts = tuple(zip(calls, requests, strict=True))
        self.requests = tuple(requests)
        self.mailbox = requests[0].mailbox
        self.take = self.mailbox.take  # returns the next events, at least one; the last is Ended. Raises ReaderCut
        self.is_streamed = requests[0].admission.prompt.stream
        self.on_end: Callable[[Ended], None] | None = None  # called when the caller's verdict is known
        self._closing = closing
        self._trace = trace if len(requests) > 1 else None  # the trace of a single one ends by itself
        self._on_close = on_close
        self._running = len(requests)
        self._has_ended = False
        for request in requests:
            request.calling_at_end(self._on_one_end)

    # --- what it says -------------------------------------------------------------------------------------------------

    async def end(self) -> None:
        """Wait for its end. Raises RequestFailed, ClientDisconnected where it was cancelled, and ReaderCut."""
        await self.mailbox.wait_for_end()
        self.raise_for_outcome()

    def raise_for_outcome(self) -> None:
        """Raise RequestFailed or ClientDisconnected where it has ended without an answer."""
        if self.failure is not None:
            raise RequestFailed(self.failure)
        if self.outcome != "ok":
            raise ClientDisconnected

    def frames(self) -> Iterator[AnyTokens]:
        """Iterate over what has come and was not taken; it stays, and counts, until ``close``."""
        return self.mailbox.tokens()

    def vectors(self) -> list[bytes]:
        """Return the vectors that have come, by input."""
        found = [b""] * sum(request.admission.answers for request in self.requests)
        for event in self.mailbox.events():
            if isinstance(event, Vector):
                found[event.index] = event.values
        return found

    async def ensure_recorded(self, limit_s: float) -> None:
        """Wait until it is sure to have a row: only then is its caller told anything. A stream usually is by now.

        Raises RequestFailed where it fails meanwhile: its deadline may pass sooner than a queue that hangs is given up.
        """
        until_s = time.monotonic() + limit_s
        for request in self.requests:
            for row in request.rows_stored():
                while not row.done() and time.monotonic() < until_s:
                    if self.failure is not None:
                        raise RequestFailed(self.failure)
                    await wait_until_done(row, ROW_LOOK_S)
                if not row.done():
                    log.error("%s is answered, but neither queue nor disk has stored its record", request.request_id)

    # --- how it ends --------------------------------------------------------------------------------------------------

    def _on_one_end(self, end: Ended) -> None:
        self._running -= 1
        if self._has_ended or (self._running and end.failure is None):
            return
        self._has_ended = True
        if end.failure is not None:
            self._cancel_others()
        if self.on_end is not None:
            self.on_end(Ended(self.failure))

    def cancel(self) -> None:
        """Stop: the client has disconnected, or nobody wants it any more. Does nothing to what has ended."""
        now_s = time.monotonic()
        for request in self.requests:
            request.cancel(now_s)

    def _cancel_others(self) -> None:
        """Stop those that have not failed."""
        now_s = time.monotonic()
        for request in self.requests:
            if request.failure is None:
                request.cancel(now_s)

    def hand_over(self) -> None:
        """Stop: another gateway goes on with it, and records it."""
        for request in self.requests:
            self._closing.hand_over(request)

    def told(self, status: int | None) -> None:
        """Note the status that its caller has seen, which its record tells; None: none."""
        for request in self.requests:
            request.told(status)

    def close(self, status: int | None) -> None:
        """Note that nobody reads any more. ``status``: what the caller has seen; None: it left before."""
        for request in self.requests:
            self._closing.close(request, status)
            request.calling_at_end(None)  # or each would hold the other until the collector finds them
        if self._trace is not None:
            self._trace.parts_ended(status)
        if self._on_close is not None:
            self._on_close()

    # --- how far it is ------------------------------------------------------------------------------------------------

    @property
    def only(self) -> OpenRequest | None:
        """The request, where there is one alone."""
        return self.requests[0] if len(self.requests) == 1 else None

    @property
    def state(self) -> State:
        """QUEUED until a worker has one of them, then RUNNING until all have ended."""
        states = {request.state for request in self.requests}
        return states.pop() if len(states) == 1 else State.RUNNING

    @property
    def failure(self) -> Failure | None:
        """Why there is no answer; None: there is one, there may be one, or it was cancelled."""
        for request in self.requests:
            if request.failure is not None:
                failure, param = request.failure, request.admission.prompt.param
                return failure if len(self.requests) == 1 else replace(failure, param=failure.param or param)
        return None

    @property
    def outcome(self) -> str:
        """``ok``, ``cancelled`` or ``failed``; final once it has ended."""
        if self.failure is not None:
            return "failed"
        return next((request.outcome for request in self.requests if request.outcome != "ok"), "ok")

    @property
    def attempt(self) -> int:
        """Number of attempts of the one that has had most."""
        return max(request.attempt for request in self.requests)

    @property
    def dropped(self) -> frozenset[str]:
        """Fields that the pools of the answer have left out."""
        return frozenset[str]().union(*(request.dropped for request in self.requests))

    @property
    def hosted_wait(self) -> str | None:
        """Reason why the first that waits for our own workers is at no hosted pool, though it may."""
        return next((why for request in self.requests if (why := request.hosted_wait) is not None), None)

    @property
    def published_s(self) -> float | None:
        """Time of the last one's first publication; None while one is unpublished."""
        known = [request.published_s for request in self.requests if request.published_s is not None]
        return max(known) if len(known) == len(self.requests) else None

    def place(self) -> QueuePosition | None:
        """Return the queue position of the last of them; None once none waits for its first worker."""
        places = [place for request in self.requests if (place := request.place()) is not None]
        return max(places, key=lambda place: place.position, default=None)

    @property
    def prompt_tokens(self) -> int:
        """Tokens of all prompts."""
        return sum(request.prompt_tokens for request in self.requests)

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens found in prefix caches."""
        return sum(request.cached_tokens for request in self.requests)

    @property
    def completion_tokens(self) -> int:
        """Output tokens over all requests."""
        return sum(request.completion_tokens for request in self.requests)
