"""Bodies of hot requests, of all connections of one gateway together: no more bytes of them than there is room for.

A body that finds no room stays with its sender: its connection is not read. So many at once wait, and none fails.
"""

import asyncio
from collections import Counter, deque
from collections.abc import Callable, Mapping

from gateway.settings import LimitSettings
from web.body import LARGE_BODY_BYTES, Receive, read_body
from web.errors import Overloaded


class BodyReader:
    """Reads bodies. Only the event loop touches it."""

    def __init__(self, limits: LimitSettings, limit_s: float) -> None:
        """``limit_s``: for a body to get room, and again to arrive."""
        self._max_body_bytes = limits.max_body_bytes
        self._max_bytes = max(limits.max_reading_bytes, 2 * limits.max_body_bytes)  # or the largest would never fit
        self._limit_s = limit_s
        self._by_tenant: Counter[str] = Counter()  # bytes
        self._total = 0
        self._waiting: deque[asyncio.Future[None]] = deque()  # at most as many as there are connections

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
        await self._enter(tenant, size)
        try:
            return await read_body(receive, headers, self._max_body_bytes, self._limit_s)
        finally:
            self._leave(tenant, size)

    def _most(self, headers: Mapping[bytes, bytes]) -> int:
        length = headers.get(b"content-length", b"")
        return min(int(length), self._max_body_bytes) if length.isdigit() else self._max_body_bytes

    async def _enter(self, tenant: str, size: int) -> None:
        try:
            async with asyncio.timeout(self._limit_s):
                while not self._has_room(tenant, size):
                    turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
                    self._waiting.append(turn)
                    await turn
        except TimeoutError as error:
            raise Overloaded(f"There was no room to read the request's body within {self._limit_s:g} s.") from error
        self._total += size
        self._by_tenant[tenant] += size

    def _has_room(self, tenant: str, size: int) -> bool:
        """Return whether the tenant would hold no more than it leaves to others, as in admission."""
        return self._by_tenant[tenant] + size <= self._max_bytes - self._total - size

    def _leave(self, tenant: str, size: int) -> None:
        self._total -= size
        self._by_tenant[tenant] -= size
        if not self._by_tenant[tenant]:
            del self._by_tenant[tenant]
        waiting, self._waiting = self._waiting, deque()
        for turn in waiting:  # each looks for itself: one tenant's must not keep back another's
            if not turn.done():
                turn.set_result(None)
