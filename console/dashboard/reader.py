"""Reads the ledger for the pages in a separate thread, so that SQL and rendering do not block the gateway's loop.

Connections, waiting pages and waiting times are bounded.
"""

import asyncio
import threading
from collections.abc import Awaitable, Callable
from typing import Final, Self, TypeVar

from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from db.engine import create_engine
from gateway.errors import LedgerUnavailable

MAX_CONNECTIONS: Final = 2
MAX_WAITING: Final = 32  # pages; further ones are refused
PAGE_LIMIT_S: Final = 15.0
STATEMENT_LIMIT_S: Final = 10.0

_Answer = TypeVar("_Answer")


class Reader:
    """Runs queries on the ledger, at most MAX_CONNECTIONS at a time. A context manager, which owns the thread."""

    def __init__(self, database_url: str) -> None:
        self._database_url = database_url
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="dashboard", daemon=True)
        self._free = asyncio.Semaphore(MAX_CONNECTIONS)
        self._engine: AsyncEngine | None = None
        self._waiting = 0

    async def __aenter__(self) -> Self:
        """Start the thread; it does not connect yet."""
        engine = create_engine(self._database_url, statement_limit_s=STATEMENT_LIMIT_S)
        # All figures of a page are of one moment. SQLite guarantees that anyway.
        is_postgres = engine.dialect.name == "postgresql"
        self._engine = engine.execution_options(isolation_level="REPEATABLE READ") if is_postgres else engine
        self._thread.start()
        return self

    async def __aexit__(self, *_error: object) -> None:
        """Cancel running queries, close the connections, end the thread."""
        await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(self._end(), self._loop))
        self._loop.call_soon_threadsafe(self._loop.stop)
        await asyncio.to_thread(self._thread.join)
        self._loop.close()

    async def read(
        self, ask: Callable[[AsyncConnection], Awaitable[_Answer]], limit_s: float = PAGE_LIMIT_S
    ) -> _Answer:
        """Return what ``ask`` returns, run in the reader's thread. Raises LedgerUnavailable and what ``ask`` raises."""
        if self._waiting >= MAX_WAITING:
            raise LedgerUnavailable("Too many pages are being loaded. Try again.")
        self._waiting += 1
        try:
            asked = asyncio.run_coroutine_threadsafe(self._ask(ask, limit_s), self._loop)
            return await asyncio.wrap_future(asked)
        except TimeoutError as error:
            raise LedgerUnavailable(f"The ledger did not answer within {limit_s:g} s.") from error
        finally:
            self._waiting -= 1

    async def _ask(self, ask: Callable[[AsyncConnection], Awaitable[_Answer]], limit_s: float) -> _Answer:
        assert self._engine is not None  # noqa: S101  # entered
        async with asyncio.timeout(limit_s), self._free, self._engine.connect() as connection:
            return await ask(connection)

    async def _end(self) -> None:
        others = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        if self._engine is not None:
            await self._engine.dispose()
