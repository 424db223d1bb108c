"""One answer as it was sent, for any number of readers."""

import asyncio
from collections.abc import Callable, Iterable

from protocol.gateways import MAX_PART_BYTES

Headers = tuple[tuple[bytes, bytes], ...]


class RecordingTruncated(Exception):
    """Raised where the answer outgrew the space for recordings and a reader's next byte was dropped."""


class Recording:
    """Takes an answer as it is written. Readers come at any time and read from the first byte on."""

    def __init__(self, on_growth: Callable[[int], None]) -> None:
        self.head: tuple[int, Headers] | None = None  # status and headers
        self.ended = False
        self.complete = False  # ended, and nothing is missing
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
        """True for a complete and good answer."""
        return self.complete and self.head is not None and self.head[0] == 200 and not self._forgotten_bytes

    def start(self, status: int, headers: Iterable[tuple[bytes, bytes]]) -> None:
        """Take the head."""
        self.head = status, tuple(headers)
        self._notify()

    def write(self, body: bytes, *, more: bool) -> None:
        """Take a piece of the body."""
        self._body += body
        self.complete = not more
        self._on_growth(len(body))
        self._notify()

    def end(self) -> None:
        """Note that nothing more comes."""
        self.ended = True
        self._notify()

    def forget_front(self, count_bytes: int) -> None:
        """Drop the oldest part of the body; readers behind it fail."""
        del self._body[:count_bytes]
        self._forgotten_bytes += count_bytes

    def _notify(self) -> None:
        self._changed.set()
        self._changed.clear()

    async def wait_for_more(self, position: int) -> None:
        """Return once there is something to read at ``position``, or nothing more will come."""
        while not self.ended and position >= self._forgotten_bytes + len(self._body):
            await self._changed.wait()

    def read(self, position: int) -> tuple[bytes, bool]:
        """Return the body from byte ``position`` on, and whether that is its end. Raises RecordingTruncated."""
        start = position - self._forgotten_bytes
        if start < 0:
            raise RecordingTruncated
        body = bytes(self._body[start : start + MAX_PART_BYTES])
        return body, self.ended and start + len(body) >= len(self._body)
