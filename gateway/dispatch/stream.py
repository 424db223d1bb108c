"""Several requests that the client has sent as one and that are answered as one: all of them, or none.

Each is a request like any other, with its own job, attempts and record. Only what they share is here: the first that
fails has the others cancelled, and its failure is the answer.
"""

import asyncio
import time
from collections.abc import Callable, Sequence
from functools import partial

from msgspec.structs import replace

from gateway.dispatch.lifecycle import OpenRequest, State
from gateway.errors import Failure
from gateway.request.mailbox import Ended
from gateway.request.request import QueuePosition


class RequestGroup:
    """Offers the answer's writer what an ``OpenRequest`` does, over several requests that share a mailbox."""

    def __init__(self, requests: Sequence[OpenRequest]) -> None:
        """``requests`` have just been opened."""
        self.mailbox = requests[0].mailbox
        self.failure: Failure | None = None
        self.on_end: Callable[[Ended], None] | None = None  # called when the caller's verdict is known
        self._requests = tuple(requests)
        self._running = len(requests)
        for request in requests:
            request.on_end = partial(self._on_one_end, request)

    def _on_one_end(self, request: OpenRequest, end: Ended) -> None:
        self._running -= 1
        if self.failure is not None or (self._running and end.failure is None):
            return
        if end.failure is not None:
            self.failure = replace(end.failure, param=end.failure.param or request.admission.prompt_param)
            self._cancel_all_but(request)
        if self.on_end is not None:
            self.on_end(Ended(self.failure))

    def _cancel_all_but(self, failed: OpenRequest) -> None:
        now_s = time.monotonic()
        for request in self._requests:
            if request is not failed:
                request.cancel(now_s)

    def cancel(self, now_s: float) -> None:
        """Stop all of them: the client has disconnected."""
        for request in self._requests:
            request.cancel(now_s)

    @property
    def state(self) -> State:
        """QUEUED until a worker has one of them, then RUNNING until all have ended."""
        states = {request.state for request in self._requests}
        return states.pop() if len(states) == 1 else State.RUNNING

    @property
    def outcome(self) -> str:
        """Like ``OpenRequest``, over all of them."""
        if self.failure is not None:
            return "failed"
        return next((request.outcome for request in self._requests if request.outcome != "ok"), "ok")

    @property
    def attempt(self) -> int:
        """Number of attempts of the one that has had most."""
        return max(request.attempt for request in self._requests)

    @property
    def hosted_wait(self) -> str | None:
        """Reason why the first that waits for our own workers is at no hosted pool, though it may."""
        return next((why for request in self._requests if (why := request.hosted_wait) is not None), None)

    @property
    def published_s(self) -> float | None:
        """Time of the last one's first publication; None while one is unpublished."""
        known = [request.published_s for request in self._requests if request.published_s is not None]
        return max(known) if len(known) == len(self._requests) else None

    @property
    def prompt_tokens(self) -> int:
        """Tokens of all prompts."""
        return sum(request.prompt_tokens for request in self._requests)

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens found in prefix caches."""
        return sum(request.cached_tokens for request in self._requests)

    @property
    def completion_tokens(self) -> int:
        """Output tokens over all requests."""
        return sum(request.completion_tokens for request in self._requests)

    @property
    def http_status(self) -> int | None:
        """Status of their one response, if it was sent."""
        return self._requests[0].http_status

    @http_status.setter
    def http_status(self, status: int | None) -> None:
        for request in self._requests:
            request.http_status = status

    def rows_stored(self) -> Sequence[asyncio.Future[None]]:
        """Like ``OpenRequest``, over all of them."""
        return [row for request in self._requests for row in request.rows_stored()]

    def place(self) -> QueuePosition | None:
        """Return the queue position of the last of them; None once none waits for its first worker."""
        places = [place for request in self._requests if (place := request.place()) is not None]
        return max(places, key=lambda place: place.position, default=None)
