"""Bodies of hot requests, of all connections of one gateway together: no more bytes of them than there is room for.

A body that finds no room stays with its sender: its connection is not read. So many at once wait, and none fails.
"""

from collections.abc import Callable, Mapping

from gateway.http.body import LARGE_BODY_BYTES, Receive, read_body
from gateway.http.byte_room import ByteRoom
from gateway.http.compressed import most_decoded_bytes
from gateway.settings import LimitSettings


class BodyReader:
    """Reads bodies. Only the event loop touches it."""

    def __init__(self, limits: LimitSettings, limit_s: float) -> None:
        """``limit_s``: for a body to get room, and again to arrive."""
        self._max_body_bytes = limits.max_body_bytes
        # Or the largest would never fit.
        self._room = ByteRoom(max(limits.max_reading_bytes, 2 * limits.max_body_bytes), limit_s)
        self._limit_s = limit_s

    async def read(
        self,
        tenant: str,
        receive: Receive,
        headers: Mapping[bytes, bytes],
        whole_body: Callable[[], bytes | None] = lambda: None,
    ) -> bytes:
        """Read a whole body; ``whole_body``: what takes a small one where it is here already.

        Raises as ``read_body`` does, and Overloaded where there was no room in time.
        """
        size = self._most(headers)
        if size <= LARGE_BODY_BYTES:  # connections are few enough for these
            return await read_body(receive, headers, self._max_body_bytes, self._limit_s, whole_body)
        async with self._room.held(tenant, size, "the request's body"):
            return await read_body(receive, headers, self._max_body_bytes, self._limit_s)

    def _most(self, headers: Mapping[bytes, bytes]) -> int:
        length = headers.get(b"content-length", b"")
        if not length.isdigit():
            return self._max_body_bytes
        if headers.get(b"content-encoding"):
            return most_decoded_bytes(int(length), self._max_body_bytes)
        return min(int(length), self._max_body_bytes)
