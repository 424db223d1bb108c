"""A room of so many bytes that tenants share."""

import asyncio
from collections import Counter, deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from gateway.errors import Overloaded


class ByteRoom:
    """So many bytes, of which no tenant holds more than it leaves to others. Only the event loop touches it."""

    def __init__(self, max_bytes: int, limit_s: float) -> None:
        """``limit_s``: how long anybody waits for room."""
        self._max_bytes = max_bytes
        self._limit_s = limit_s
        self._by_tenant: Counter[str] = Counter()  # bytes
        self._total = 0
        self._waiting: deque[asyncio.Future[None]] = deque()  # at most as many as there are connections

    @asynccontextmanager
    async def held(self, tenant: str, size: int, what: str) -> AsyncIterator[None]:
        """Hold so many bytes. Raises Overloaded where there was no room in time; ``what`` it was for."""
        await self._enter(tenant, size, what)
        try:
            yield
        finally:
            self._leave(tenant, size)

    async def _enter(self, tenant: str, size: int, what: str) -> None:
        try:
            async with asyncio.timeout(self._limit_s):
                while not self._has_room(tenant, size):
                    turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
                    self._waiting.append(turn)
                    await turn
        except TimeoutError as error:
            raise Overloaded(f"There was no room to read {what} within {self._limit_s:g} s.") from error
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
