"""Writes a streamed answer.

The head is held back until the first token or a short delay, so that a refusal by the worker is still a proper
4xx. After the head, a failure is an error event and an aborted connection: never a clean end without ``[DONE]``.
"""

import asyncio
from typing import Any, Final

from gateway.api.calls import AnswerEncoder
from gateway.api.events import comment, usage_fields
from gateway.dispatch.lifecycle import ACCEPT_LIMIT_S, State
from gateway.dispatch.stream import AnswerStream
from gateway.errors import RequestFailed
from gateway.http.exchange import SSE_HEADERS, Exchange
from gateway.request.mailbox import Ended, Event, ReaderCut, StillWaiting
from gateway.settings import TimeoutSettings
from protocol.errors import ErrorCode
from protocol.job import Deltas, Tokens

REFUSAL_LIMIT_S: Final = 2.0 * ACCEPT_LIMIT_S  # by then, a request that no worker accepted immediately is refused
LAST_WORDS_LIMIT_S: Final = 30.0  # maximum time for a client to read the end of a stream


def usage_of(stream: AnswerStream[Any]) -> dict[str, Any]:
    """Return the public usage of a successful answer."""
    return usage_fields(stream.prompt_tokens, stream.cached_tokens, stream.completion_tokens)


def _last_moment_s(end: Ended) -> float:
    """Return when to stop waiting for a client that does not read (loop clock)."""
    has_not_read = end.failure is not None and end.failure.code is ErrorCode.SLOW_CLIENT
    return asyncio.get_running_loop().time() + (0 if has_not_read else LAST_WORDS_LIMIT_S)


class StreamWriter:
    """Writes the events of an answer to its reply."""

    def __init__(
        self,
        exchange: Exchange,
        maker: AnswerEncoder,
        stream: AnswerStream[Any],
        timeouts: TimeoutSettings,
    ) -> None:
        self._exchange = exchange
        self._stream = stream
        self._timeouts = timeouts
        self._maker = maker
        self._do_not_queue = bool(maker.request.do_not_queue)
        self._with_usage = maker.request.include_usage
        self._sent_changes: set[str] = set()  # sent in the headers
        self._chunks = maker.chunks(exchange.id, exchange.received_unix_ms // 1000)

    async def write(self) -> None:
        """Send the answer. If it cannot be completed, return early and leave the response incomplete.

        The server aborts the connection of an incomplete response.
        """
        events = await self._first_events()
        if events and isinstance(events[0], Ended) and self._stream.outcome != "ok":
            await self._refuse()
            return
        try:
            async with asyncio.timeout(None) as limit:
                self._stream.on_end = lambda end: limit.reschedule(_last_moment_s(end))
                self._stream.mailbox.on_cut = lambda: limit.reschedule(0.0)
                await self._write_all(events)
        except RequestFailed:  # before the head was sent
            await self._refuse()
        except (TimeoutError, ReaderCut):
            self._exchange.abort()
        finally:  # the time limit above applies only to this block
            self._stream.on_end = self._stream.mailbox.on_cut = None

    async def _first_events(self) -> list[Event]:
        try:
            async with asyncio.timeout(self._headers_grace_s()):
                while True:
                    events = await self._stream.take()
                    if not all(isinstance(event, StillWaiting) for event in events):
                        return events
        except TimeoutError:
            return []

    def _headers_grace_s(self) -> float:
        grace_s = self._timeouts.headers_grace_s
        # A do_not_queue request must get an error status if no worker accepts it.
        return max(grace_s, REFUSAL_LIMIT_S) if self._do_not_queue else grace_s

    async def _refuse(self) -> None:
        if self._stream.failure is not None:
            await self._exchange.answer_error(RequestFailed(self._stream.failure), self._stream)

    async def _write_all(self, events: list[Event]) -> None:
        await self._exchange.start(200, list(SSE_HEADERS), self._stream)
        self._sent_changes = self._exchange.adapted_for(self._stream)
        if not events and self._stream.state is State.QUEUED and self._timeouts.queued_comment_s:
            await self._exchange.write(self._sign_of_life(State.QUEUED.value), more=True)
        while not events or not isinstance(events[-1], Ended):
            body = self._body_of(events)
            if body:  # one write per engine step
                await self._exchange.write(body, more=True)
            events = await self._stream.take()
        await self._write_end(self._body_of(events))

    def _body_of(self, events: list[Event]) -> bytes:
        if len(events) == 1 and isinstance(events[0], Tokens):
            return self._chunks.of(events[0])
        return b"".join([self._piece(event) for event in events])

    def _piece(self, event: Event) -> bytes:
        if isinstance(event, (Tokens, Deltas)):
            return self._chunks.of(event)
        return self._sign_of_life(event.state) if isinstance(event, StillWaiting) else b""

    def _sign_of_life(self, state: str) -> bytes:
        place = self._stream.queue_position()
        if place is None:
            return comment(state)
        eta = "" if place.eta_s is None else f" eta={place.eta_s:.1f}"
        why = self._stream.hosted_wait
        hosted = "" if why is None else f" hosted={why}"
        return comment(f"queued position={place.position}{eta}{hosted}")

    async def _write_end(self, body: bytes) -> None:
        stream = self._stream
        if stream.outcome == "ok":
            usage = self._chunks.usage(usage_of(stream), stream.attempt) if self._with_usage else b""
            await self._maker.before_end()
            # The headers have already been sent.
            with_comments = self._timeouts.queued_comment_s > 0
            late = comment(f"spillway attempts={stream.attempt}") if with_comments and stream.attempt > 1 else b""
            if with_comments and (adapted := self._exchange.adapted_for(stream) - self._sent_changes):
                late += comment(f"spillway adapted={', '.join(sorted(adapted))}")
            await self._exchange.write(body + usage + late + self._maker.done, more=False)
        elif stream.failure is not None:
            await self._exchange.write(body + self._maker.error_event(RequestFailed(stream.failure)), more=True)
