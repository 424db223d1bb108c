"""The answer to one call, from its one or several requests.

Each of several is an ordinary request with its own job, attempts and record. This module has only their common parts:
all feed one mailbox, and the first failure cancels the others and is the answer.
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

ROW_LOOK_S: Final = 0.05  # how soon a failure is noticed while waiting for the intent

log = logging.getLogger(__name__)


class Closing(Protocol):
    """Closes requests and records them: the dispatcher."""

    def close(self, request: OpenRequest, http_status: int | None) -> None:
        """Close a request whose answer has ended; ``http_status``: as sent; None: the client disconnected before."""
        ...

    def hand_over(self, request: OpenRequest) -> None:
        """Stop a request that another gateway continues and records."""
        ...


class AnswerStream(Generic[AnyCall]):
    """The events of a call. Call ``close`` when done reading."""

    def __init__(
        self,
        calls: Sequence[AnyCall],
        requests: Sequence[OpenRequest],
        closing: Closing,
        *,
        trace: Trace | None = None,
        on_close: Callable[[], None] | None = None,
    ) -> None:
        """``requests``: of the calls, just opened. ``trace``: of all together; ``on_close``: called by ``close``."""
        self.parts = tuple(zip(calls, requests, strict=True))
        self.requests = tuple(requests)
        self.mailbox = requests[0].mailbox
        self.take = self.mailbox.take  # returns the next events, at least one; the last is Ended. Raises ReaderCut
        self.is_streamed = requests[0].admission.prompt.stream
        self.on_end: Callable[[Ended], None] | None = None  # called when the client's outcome is known
        self._closing = closing
        self._trace = trace if len(requests) > 1 else None  # a single request ends its trace itself
        self._on_close = on_close
        self._running = len(requests)
        self._has_ended = False
        for request in requests:
            request.notify_at_end(self._on_one_end)

    # --- events -------------------------------------------------------------------------------------------------------

    async def end(self) -> None:
        """Wait for the end. Raises RequestFailed, ClientDisconnected if it was canceled, and ReaderCut."""
        await self.mailbox.wait_for_end()
        self.raise_for_outcome()

    def raise_for_outcome(self) -> None:
        """Raise RequestFailed or ClientDisconnected if it ended without an answer."""
        if self.failure is not None:
            raise RequestFailed(self.failure)
        if self.outcome != "ok":
            raise ClientDisconnected

    def frames(self) -> Iterator[AnyTokens]:
        """Iterate over the unread frames; they stay in the mailbox, and count, until ``close``."""
        return self.mailbox.tokens()

    def vectors(self) -> list[bytes]:
        """Return the received vectors, in order of the inputs."""
        found = [b""] * sum(request.admission.answers for request in self.requests)
        for event in self.mailbox.events():
            if isinstance(event, Vector):
                found[event.index] = event.values
        return found

    async def ensure_recorded(self, limit_s: float) -> None:
        """Wait until the call is sure to have ledger rows, before anything is sent. A stream's usually are by now.

        Raises RequestFailed if it fails meanwhile: its deadline may pass before the queue server answers.
        """
        until_s = time.monotonic() + limit_s
        for request in self.requests:
            for row in request.rows_stored():
                while not row.done() and time.monotonic() < until_s:
                    if self.failure is not None:
                        raise RequestFailed(self.failure)
                    await wait_until_done(row, ROW_LOOK_S)
                if not row.done():
                    log.error(
                        "answering %s although neither the queue nor the disk stored its record", request.request_id
                    )

    # --- end ----------------------------------------------------------------------------------------------------------

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
        """Stop, because the client disconnected or no longer wants the answer. Ignored once ended."""
        now_s = time.monotonic()
        for request in self.requests:
            request.cancel(now_s)

    def _cancel_others(self) -> None:
        """Stop the requests that have not failed."""
        now_s = time.monotonic()
        for request in self.requests:
            if request.failure is None:
                request.cancel(now_s)

    def hand_over(self) -> None:
        """Stop, because another gateway continues and records the call."""
        for request in self.requests:
            self._closing.hand_over(request)

    def note_status(self, status: int | None) -> None:
        """Note the HTTP status that the client received, for the record; None: none."""
        for request in self.requests:
            request.note_status(status)

    def close(self, status: int | None) -> None:
        """End reading. ``status``: as sent; None: the client disconnected before."""
        for request in self.requests:
            self._closing.close(request, status)
            request.notify_at_end(None)  # breaks a reference cycle
        if self._trace is not None:
            self._trace.parts_ended(status)
        if self._on_close is not None:
            self._on_close()

    # --- progress -----------------------------------------------------------------------------------------------------

    @property
    def only(self) -> OpenRequest | None:
        """The request, if there is only one."""
        return self.requests[0] if len(self.requests) == 1 else None

    @property
    def state(self) -> State:
        """QUEUED until a worker accepts one of the requests, then RUNNING until all have ended."""
        states = {request.state for request in self.requests}
        return states.pop() if len(states) == 1 else State.RUNNING

    @property
    def failure(self) -> Failure | None:
        """Why there is no answer; None: there is or may be one, or the call was canceled."""
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
        """The highest number of attempts of any request."""
        return max(request.attempt for request in self.requests)

    @property
    def dropped(self) -> frozenset[str]:
        """Fields that the pools of the answer ignored."""
        return frozenset[str]().union(*(request.dropped for request in self.requests))

    @property
    def hosted_wait(self) -> str | None:
        """Why the first request that waits for own workers is not at a hosted pool although it may be."""
        return next((why for request in self.requests if (why := request.hosted_wait) is not None), None)

    @property
    def published_s(self) -> float | None:
        """Time when the last request was first published; None while one is unpublished."""
        known = [request.published_s for request in self.requests if request.published_s is not None]
        return max(known) if len(known) == len(self.requests) else None

    def queue_position(self) -> QueuePosition | None:
        """Return the highest queue position; None once no request waits for its first worker."""
        positions = [position for request in self.requests if (position := request.queue_position()) is not None]
        return max(positions, key=lambda position: position.position, default=None)

    @property
    def prompt_tokens(self) -> int:
        return sum(request.prompt_tokens for request in self.requests)

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens found in prefix caches."""
        return sum(request.cached_tokens for request in self.requests)

    @property
    def completion_tokens(self) -> int:
        """Output tokens over all requests."""
        return sum(request.completion_tokens for request in self.requests)
