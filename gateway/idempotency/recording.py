"""An answer as it was sent, for any number of readers."""

import asyncio
from collections.abc import Callable, Iterable

from protocol.gateways import MAX_PART_BYTES

Headers = tuple[tuple[bytes, bytes], ...]


class RecordingTruncated(Exception):
    """The recording outgrew its memory, and a reader's next byte was dropped."""


class Recording:
    """Records an answer while it is written. Readers can join at any time and start at the first byte."""

    def __init__(self, on_growth: Callable[[int], None]) -> None:
        self.head: tuple[int, Headers] | None = None  # status and headers
        self.ended = False
        self.complete = False  # ended without errors or gaps
        self._body = bytearray()
        self._forgotten_bytes = 0
        self._on_growth = on_growth
        self._changed = asyncio.Event()

    @property
    def kept_bytes(self) -> int:
        """Size of the body in bytes."""
        return len(self._body)

    @property
    def can_be_replayed(self) -> bool:
        """True for a complete, successful answer."""
        return self.complete and self.head is not None and self.head[0] == 200 and not self._forgotten_bytes

    def start(self, status: int, headers: Iterable[tuple[bytes, bytes]]) -> None:
        """Record status and headers."""
        self.head = status, tuple(headers)
        self._notify()

    def write(self, body: bytes, *, more: bool) -> None:
        """Record a piece of the body."""
        self._body += body
        self.complete = not more
        self._on_growth(len(body))
        self._notify()

    def end(self) -> None:
        """Mark the end."""
        self.ended = True
        self._notify()

    def forget_front(self, count_bytes: int) -> None:
        """Drop the oldest part of the body. Readers that need it fail."""
        del self._body[:count_bytes]
        self._forgotten_bytes += count_bytes

    def _notify(self) -> None:
        self._changed.set()
        self._changed.clear()

    async def wait_for_more(self, position: int) -> None:
        """Wait until there is data at ``position``, or the recording has ended."""
        while not self.ended and position >= self._forgotten_bytes + len(self._body):
            await self._changed.wait()

    def read(self, position: int) -> tuple[bytes, bool]:
        """Return the body from byte ``position``, and whether it ends there. Raises RecordingTruncated."""
        start = position - self._forgotten_bytes
        if start < 0:
            raise RecordingTruncated
        body = bytes(self._body[start : start + MAX_PART_BYTES])
        return body, self.ended and start + len(body) >= len(self._body)
