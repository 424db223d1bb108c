"""The threads that parse, render and encode long prompts, shared fairly between tenants.

    tenant a: [4 MB] [4 MB] ──┐
    tenant b: [20 KB] ────────┼─ round robin ─> ENCODER_THREADS
    tenant c: [5 KB] [5 KB] ──┘

Short items find a thread soon, however long the others take: of the long ones each tenant runs one at a time, on all
threads but one. Waiting items are bounded per tenant and in total.
"""

import asyncio
import ctypes
import os
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, Final, TypeVar

from gateway.errors import RETRY_SOON_S, Overloaded, RateLimitExceeded

# One more than long items may use: they run without the GIL, beside the event loop and the engines.
ENCODER_THREADS: Final = max(2, min(4, (os.cpu_count() or 1) // 2 + 1))
LONG_BYTES: Final = 64 * 1024  # of text: some 50 ms of encoding
# Running and waiting. A body may have 4 MB, and ASCII text takes one byte per character.
MAX_BYTES: Final = 64 * 1024 * 1024
MAX_TENANT_BYTES: Final = 16 * 1024 * 1024
MAX_TENANT_ITEMS: Final = 256
TRIM_BYTES: Final = 512 * 1024  # of text: encoding temporarily allocates about 100 times as much

_malloc_trim: Final[Callable[[int], int] | None] = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc's

_Result = TypeVar("_Result")


class _WorkItem:
    """A function to run in a thread."""

    __slots__ = ("do", "done", "is_long")

    def __init__(self, do: Callable[[], Any], *, is_long: bool) -> None:
        self.do = do
        self.is_long = is_long
        self.done: asyncio.Future[Any] = asyncio.get_running_loop().create_future()


class _Share:
    """One tenant's waiting and running items."""

    __slots__ = ("count_bytes", "items", "runs_long", "waiting")

    def __init__(self) -> None:
        self.waiting: deque[_WorkItem] = deque()
        self.items = 0  # waiting and running
        self.count_bytes = 0  # of these items
        self.runs_long = False


class EncoderPool:
    """A fair thread pool. Use it from the event loop only; work runs in its threads."""

    def __init__(self, threads: int = ENCODER_THREADS) -> None:
        self._most = threads
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix="encode")
        self._shares: dict[str, _Share] = {}  # tenants with items, next turn first
        self._bytes = 0
        self._running = 0
        self._running_long = 0

    async def run(
        self, tenant: str, size_bytes: int, work: Callable[[], _Result], *, is_quick: bool = False
    ) -> _Result:
        """Run ``work`` in a thread. ``size_bytes`` of text decide whether it counts as long.

        ``is_quick``: short at any size.
        Raises RateLimitExceeded if too much of the tenant's work is queued, and Overloaded if too much in total.
        """
        share = self._shares.get(tenant) or _Share()
        self._refuse_if_full(share, size_bytes)
        self._shares[tenant] = share
        do = work if is_quick or size_bytes <= TRIM_BYTES else partial(_do_and_trim, work)
        one = _WorkItem(do, is_long=size_bytes > LONG_BYTES and not is_quick)
        share.waiting.append(one)
        self._count(share, 1, size_bytes)
        self._start_some()
        try:
            result: _Result = await one.done
            return result
        finally:
            del one, work, do  # of an error, this frame would hold the item, which holds the error
            self._count(share, -1, -size_bytes)
            if not share.items:
                self._shares.pop(tenant, None)

    def _refuse_if_full(self, share: _Share, size_bytes: int) -> None:
        # An item that alone exceeds a bound is accepted when nothing else is queued; otherwise it would never run.
        is_full = share.count_bytes and share.count_bytes + size_bytes > MAX_TENANT_BYTES
        if is_full or share.items >= MAX_TENANT_ITEMS:
            message = (
                "Too many long prompts of this API key or its team are being tokenized at the moment. Try again later."
            )
            raise RateLimitExceeded(message, retry_after_s=RETRY_SOON_S)
        if self._bytes and self._bytes + size_bytes > MAX_BYTES:
            raise Overloaded("Too many long prompts are being tokenized at the moment. Try again later.")

    def _count(self, share: _Share, items: int, count_bytes: int) -> None:
        share.items += items
        share.count_bytes += count_bytes
        self._bytes += count_bytes

    def _start_some(self) -> None:
        while self._running < self._most:
            found = self._next()
            if found is None:
                return
            self._start(*found)

    def _next(self) -> tuple[_Share, _WorkItem] | None:
        """Return the next item to run, and move its tenant to the end of the round."""
        for tenant, share in self._shares.items():
            while share.waiting and share.waiting[0].done.done():  # its caller no longer waits
                share.waiting.popleft()
            if share.waiting and self._may_run(share, share.waiting[0]):
                self._shares[tenant] = self._shares.pop(tenant)
                return share, share.waiting.popleft()
        return None

    def _may_run(self, share: _Share, work: _WorkItem) -> bool:
        return not work.is_long or (not share.runs_long and self._running_long < self._most - 1)

    def _start(self, share: _Share, work: _WorkItem) -> None:
        self._running += 1
        if work.is_long:
            self._running_long += 1
            share.runs_long = True
        running = asyncio.get_running_loop().run_in_executor(self._threads, work.do)
        running.add_done_callback(lambda ended: self._ended(share, work, ended))

    def _ended(self, share: _Share, work: _WorkItem, ended: asyncio.Future[Any]) -> None:
        self._running -= 1
        if work.is_long:
            self._running_long -= 1
            share.runs_long = False
        if ended.cancelled():
            work.done.cancel()
        elif work.done.done():
            ended.exception()  # its caller no longer waits
        elif (error := ended.exception()) is not None:
            work.done.set_exception(error)
        else:
            work.done.set_result(ended.result())
        self._start_some()

    def close(self) -> None:
        """Stop the threads."""
        self._threads.shutdown(wait=False, cancel_futures=True)


def _do_and_trim(do: Callable[[], _Result]) -> _Result:
    """Run ``do`` and return freed memory to the system; the allocator would keep 0.5 GB after 4 MB of text."""
    try:
        return do()
    finally:
        if _malloc_trim is not None:
            _malloc_trim(0)
