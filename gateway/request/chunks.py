"""How frames become events of a stream."""

from typing import Any, Protocol

from protocol.chat import Deltas
from protocol.messages import Tokens


class Chunks(Protocol):
    """Turns one request's frames into events."""

    def of(self, frame: Tokens | Deltas) -> bytes:
        """The events of one frame; may be none."""
        ...

    def usage(self, usage: dict[str, Any], attempts: int) -> bytes:
        """The chunk without choices that ends a stream with usage, and says how many attempts it took if several."""
        ...
