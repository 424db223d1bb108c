"""Base of the calls of all hot routes."""

from collections.abc import Mapping, Sequence
from typing import Any, Generic, Self, TypeVar

from gateway.api.events import DONE, error_event
from gateway.api.misspelt import refuse_misspelt
from gateway.api.schema import JobRequest
from gateway.errors import Refused
from gateway.request.request import Prompt
from gateway.settings import GatewaySettings

_Request = TypeVar("_Request", bound=JobRequest)


class JobCall(Generic[_Request]):
    """A call with its validated body."""

    request: _Request
    adapted: set[str]  # what was changed so that its model takes it (gateway.tokenizing.turns)
    misspelt: Mapping[str, str]  # unknown fields, each with the known one that it is near
    _defaults: Mapping[str, float] = {}  # the model's own sampling parameters, once its prompt is encoded

    def parts(self, settings: GatewaySettings) -> Sequence[Self]:
        """Implement ``Call``: it is one request."""
        if settings.strict_fields:
            refuse_misspelt(self.misspelt)
        return [self]

    def check(self, prompts: Sequence[Prompt], settings: GatewaySettings) -> None:
        """Implement ``Call``."""

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
