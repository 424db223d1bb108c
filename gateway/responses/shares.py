"""Where callers read what is stored of their responses: each tenant in its share of memory, and of threads."""

from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from typing import Any, Final, Protocol, TypeVar

from gateway.http.body import LARGE_BODY_BYTES, ByteRoom

MAX_OPENED_BODIES: Final = 2  # a stored response opens to so many times max_body_bytes: its conversation, and itself
MAX_OPENED_PART_BODIES: Final = 4  # a part of events may tell a response twice, and hold it once more
MAX_READ_BODIES: Final = MAX_OPENED_BODIES + MAX_OPENED_PART_BODIES  # that are opened at once

_Result = TypeVar("_Result")


class Shares(Protocol):
    """The memory and the threads in which callers read what is stored."""

    def room(self, tenant: str, size_bytes: int) -> AbstractAsyncContextManager[None]:
        """Hold so much memory. Raises an ApiError where there is none in time."""
        ...

    async def run(self, tenant: str, size_bytes: int, work: Callable[[], _Result]) -> _Result:
        """Do what reads so many bytes. Raises an ApiError where the tenant has too much of it."""
        ...


class Threads(Protocol):
    """Threads that tenants share: ``gateway.tokenizing.encoder_pool.EncoderPool``."""

    def run(self, tenant: str, size_bytes: int, work: Callable[[], Any], *, is_quick: bool) -> Awaitable[Any]:
        """Run ``work``. Raises RateLimitExceeded or Overloaded."""
        ...


class ReadShares:
    """The ``Shares`` of a gateway."""

    def __init__(self, max_bytes: int, max_body_bytes: int, limit_s: float, threads: Threads) -> None:
        """``limit_s``: how long a read waits for room."""
        self._room = ByteRoom(max(max_bytes, 2 * MAX_READ_BODIES * max_body_bytes), limit_s)  # or one would never fit
        self._threads = threads

    def room(self, tenant: str, size_bytes: int) -> AbstractAsyncContextManager[None]:
        """Implement ``Shares``."""
        return self._room.held(tenant, size_bytes, "the stored response")

    async def run(self, tenant: str, size_bytes: int, work: Callable[[], _Result]) -> _Result:
        """Implement ``Shares``: in a thread, where it is large."""
        if size_bytes <= LARGE_BODY_BYTES:
            return work()
        result: _Result = await self._threads.run(tenant, size_bytes, work, is_quick=True)
        return result
