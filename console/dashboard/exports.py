"""Exports of all requests that pass a view's filters: written page by page while they are downloaded."""

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Final

from sqlalchemy.ext.asyncio import AsyncConnection

from console.dashboard.export_files import FORMATS, Sink
from console.dashboard.reader import Reader
from console.dashboard.view import View
from db.engine import SQL_ERRORS, describe
from gateway.errors import LedgerUnavailable, Overloaded
from gateway.http.pages import resumed
from ledger.queries.log import Cursor, Page, request_page

MAX_ROWS: Final = 1_000_000  # of one export
MAX_RUNNING: Final = 2
PAGE_ROWS: Final = 1000
MAX_TRIES: Final = 30  # of each page but the first, while the ledger does not answer
TRY_AGAIN_S: Final = 2.0

_AWAY: Final[tuple[type[Exception], ...]] = (LedgerUnavailable, *SQL_ERRORS)

log = logging.getLogger(__name__)


class Exports:
    """Writes exports. Used by the event loop only."""

    def __init__(self, reader: Reader, *, page_rows: int = PAGE_ROWS, try_again_s: float = TRY_AGAIN_S) -> None:
        self._reader = reader
        self._page_rows = page_rows
        self._try_again_s = try_again_s
        self._running = 0

    async def start(self, view: View, format_name: str) -> AsyncIterator[bytes]:
        """Return a file's parts, once the first is written.

        Raises Overloaded, LedgerUnavailable, and SQL's own errors.
        """
        if self._running >= MAX_RUNNING:
            raise Overloaded(f"{MAX_RUNNING} exports are already running. Try again when one has finished.")
        parts = self._parts(view, format_name)
        return resumed(await anext(parts), parts)

    async def _parts(self, view: View, format_name: str) -> AsyncGenerator[bytes]:
        self._running += 1
        try:
            sink, rows = Sink(), 0
            # In threads: opening may import a large library, and a page takes as long as some hundred tokens.
            writer = await asyncio.to_thread(FORMATS[format_name].open_writer, sink)
            page = await self._read(view, None, self._page_rows)
            while True:
                await asyncio.to_thread(writer.write, page.requests)
                rows += len(page.requests)
                if page.next is None or rows >= MAX_ROWS:
                    break
                yield sink.take()
                page = await self._read_patiently(view, page.next, min(self._page_rows, MAX_ROWS - rows))
            await asyncio.to_thread(writer.close)
            yield sink.take()
        finally:
            self._running -= 1

    async def _read_patiently(self, view: View, after: Cursor, limit: int) -> Page:
        """Read a page until the ledger answers, at most ``MAX_TRIES`` times."""
        for _ in range(MAX_TRIES - 1):
            try:
                return await self._read(view, after, limit)
            except _AWAY as error:
                log.info("export is waiting for the ledger: %s", describe(error))
                await asyncio.sleep(self._try_again_s)
        return await self._read(view, after, limit)

    async def _read(self, view: View, after: Cursor | None, limit: int) -> Page:
        async def ask(connection: AsyncConnection) -> Page:
            return await request_page(
                connection,
                view.since_unix_ms,
                view.until_unix_ms,
                where=view.filters,
                tags=view.tags,
                after=after,
                limit=limit,
            )

        return await self._reader.read(ask)
