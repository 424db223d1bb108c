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
    adapted: set[str]  # names of changes made for the model (gateway.tokenizing.turns)
    misspelt: Mapping[str, str]  # unknown fields, each with the known field that it resembles
    _defaults: Mapping[str, float] = {}  # the model's default sampling parameters, set when the prompt is encoded

    def parts(self, settings: GatewaySettings) -> Sequence[Self]:
        """Implement ``Call``: the call is one request."""
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
        """Serve the request with batch priority: the key allows no other."""
        self.request = self.request.model_copy(update={"service_tier": "flex"})
