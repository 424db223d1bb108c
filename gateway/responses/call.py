"""A validated body of Responses, and the storage of its answer."""

import logging
from collections.abc import Awaitable, Callable
from typing import Any, Protocol, cast

from gateway.api.openai_items import Item
from gateway.api.openai_responses import ResponseEvents, Responses, ResponsesTranslation
from gateway.api.surface import SurfaceCall
from gateway.errors import Refused
from gateway.request.mailbox import Chunks
from gateway.responses.messages import NotKept
from protocol.errors import BusError
from protocol.job import Deltas, Tokens

Keeping = Callable[[dict[str, Any], list[Item]], Awaitable[None]]

log = logging.getLogger(__name__)


class EventRecorder(Protocol):
    """Records the events of a background response and the frames behind them."""

    def add(self, frame: Tokens | Deltas | None, events: bytes, response: dict[str, Any] | None = None) -> None:
        """Add the next events. ``response``: with the last events, the final response."""
        ...


class ResponsesCall(SurfaceCall):
    """A call whose answer may be stored or generated in the background."""

    keep: Keeping | None = None  # stores a complete response with its input items
    recorder: EventRecorder | None = None  # of a background response

    def __init__(self, surface: Responses, body: bytes) -> None:
        super().__init__(surface, body)
        self.body = body
        self.asked = cast("ResponsesTranslation", self._translation)

    @property
    def _response_events(self) -> ResponseEvents:
        """Encoder of the events, available after ``chunks``."""
        return cast("ResponseEvents", self._events)

    def first_response(self, answer_id: str, created: int) -> tuple[bytes, dict[str, Any]]:
        """Return the first events of a background response, and its initial response."""
        events = self.asked.events(self._head(answer_id, created))
        return events.queued(), events.response

    def chunks(self, answer_id: str, created: int) -> Chunks:
        """Implement ``Call``."""
        chunks = super().chunks(answer_id, created)
        if self.recorder is None:
            return chunks
        self.recorder.add(None, self._response_events.queued())
        return _RecordedChunks(chunks, self.recorder)

    def error_event(self, error: Refused) -> bytes:
        """Implement ``AnswerEncoder``."""
        events = super().error_event(error)
        if self.recorder is not None:
            self.recorder.add(None, events, self._response_events.response)
        return events

    def cancelled(self) -> None:
        """Record the cancellation."""
        if self.recorder is not None:
            self.recorder.add(None, self._response_events.cancelled(), self._response_events.response)

    async def before_end(self, body: dict[str, Any] | None = None) -> None:
        """Implement ``AnswerEncoder``: store the response; if that fails, set ``store`` to false in it."""
        response = self._response_events.response if body is None else body
        if self.recorder is not None:
            self.recorder.add(None, self._response_events.last, response)
        elif self.keep is not None:
            answer_id = str(response["id"]).removeprefix("resp_")
            try:
                await self.keep(response, self.asked.items(answer_id))
            except (BusError, NotKept) as error:
                log.warning("the response %s could not be stored: %s", response["id"], error)
                response["store"] = False


class ResponsesCalls:
    """Creates the calls of Responses."""

    def __init__(self, surface: Responses) -> None:
        self.surface = surface
        self.name = surface.name

    def __call__(self, body: bytes) -> ResponsesCall:
        """Validate a body. Raises MalformedJson or InvalidParameter."""
        return ResponsesCall(self.surface, body)


class _RecordedChunks:
    """``Chunks`` that record what they encode."""

    def __init__(self, inner: Chunks, recorder: EventRecorder) -> None:
        self._inner = inner
        self._recorder = recorder

    def of(self, frame: Tokens | Deltas) -> bytes:
        """Implement ``Chunks``."""
        events = self._inner.of(frame)
        self._recorder.add(frame, events)
        return events

    def usage(self, usage: dict[str, Any], attempts: int) -> bytes:
        """Implement ``Chunks``."""
        events = self._inner.usage(usage, attempts)
        self._recorder.add(None, events)
        return events
