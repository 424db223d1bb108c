"""Base of the calls of all hot routes."""

from typing import Generic, TypeVar

from gateway.api.schema import JobRequest

_Request = TypeVar("_Request", bound=JobRequest)


class JobCall(Generic[_Request]):
    """A call with its validated body."""

    request: _Request

    def serve_as_batch(self) -> None:
        """Serve the request as batch, whatever the client asked: its key allows no more."""
        self.request = self.request.model_copy(update={"service_tier": "flex"})
