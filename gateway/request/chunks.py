"""Encoders from frames to events of a stream."""

from typing import Any, Protocol

from protocol.job import Deltas, Tokens


class Chunks(Protocol):
    """Encodes one request's frames as events."""

    def of(self, frame: Tokens | Deltas) -> bytes:
        """Return the events of one frame; may be none."""
        ...

    def usage(self, usage: dict[str, Any], attempts: int) -> bytes:
        """Return the chunk without choices that ends a stream with usage, and the number of attempts if several."""
        ...
