"""Base of the calls of all hot routes."""

from collections.abc import Mapping
from typing import Any, Generic, TypeVar

from gateway.api.events import DONE, error_event
from gateway.api.schema import JobRequest
from gateway.errors import Refused

_Request = TypeVar("_Request", bound=JobRequest)


class JobCall(Generic[_Request]):
    """A call with its validated body."""

    request: _Request
    _defaults: Mapping[str, float] = {}  # the model's own sampling parameters, once its prompt is encoded

    @property
    def done(self) -> bytes:
        """Implement ``AnswerEncoder``."""
        return DONE

    async def before_end(self, body: dict[str, Any] | None = None) -> None:
        """Implement ``AnswerEncoder``."""

    def error_event(self, error: Refused) -> bytes:
        """Implement ``AnswerEncoder``."""
        return error_event(error)

    def serve_as_batch(self) -> None:
        """Serve the request as batch, whatever the client asked: its key allows no more."""
        self.request = self.request.model_copy(update={"service_tier": "flex"})
