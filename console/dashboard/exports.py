"""Exports of all requests that pass a view's filters: written in the background page by page, kept for an hour.

Files are in this gateway's data folder; links are valid only on the gateway that has written them.
"""

import asyncio
import contextlib
import logging
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Final, Literal, TypeVar

from sqlalchemy.ext.asyncio import AsyncConnection

from console.dashboard.export_files import FORMATS, RowWriter
from console.dashboard.reader import Reader
from console.dashboard.view import View
from db.engine import SQL_ERRORS, describe
from gateway.errors import LedgerUnavailable, Overloaded, UnknownUrl
from ledger.queries.log import Cursor, Page, request_page
from ledger.queries.traffic import totals
from protocol.nats.clock import unix_now_ms

MAX_ROWS: Final = 1_000_000  # of one export
MAX_RUNNING: Final = 2
MAX_KEPT: Final = 20  # past it the oldest is deleted
KEPT_S: Final = 3600.0
STALE_FILE_S: Final = 2 * KEPT_S  # a file unchanged for so long belongs to no running gateway
PAGE_ROWS: Final = 1000
MAX_TRIES: Final = 30  # of one page, while the ledger does not answer
TRY_AGAIN_S: Final = 2.0

_AWAY: Final[tuple[type[Exception], ...]] = (LedgerUnavailable, *SQL_ERRORS)

log = logging.getLogger(__name__)

_Answer = TypeVar("_Answer")


@dataclass(slots=True)
class Export:
    """One export, running or done."""

    export_id: str
    format_name: str
    about: str  # the view, in words
    path: Path
    started_unix_ms: int
    state: Literal["running", "done", "failed"] = "running"
    rows: int = 0
    expected_rows: int | None = None  # by the rollups, which count whole quarters of an hour
    size_bytes: int = 0
    is_cut: bool = False  # there were more than MAX_ROWS
    ended_s: float | None = None  # by the monotonic clock
    expires_unix_ms: int | None = None
    task: "asyncio.Task[None] | None" = field(default=None, repr=False)

    @property
    def share(self) -> float | None:
        """Share that is done; None while unknown."""
        return min(1.0, self.rows / self.expected_rows) if self.expected_rows else None


class Exports:
    """Runs exports and keeps their files. Used by the event loop only."""

    def __init__(
        self, reader: Reader, folder: Path, *, page_rows: int = PAGE_ROWS, try_again_s: float = TRY_AGAIN_S
    ) -> None:
        self._reader = reader
        self._folder = folder
        self._page_rows = page_rows
        self._try_again_s = try_again_s
        self._exports: dict[str, Export] = {}
        _remove_leftovers(folder)

    def start(self, view: View, format_name: str, about: str) -> Export:
        """Start an export. Raises Overloaded."""
        self._forget_old()
        if sum(export.state == "running" for export in self._exports.values()) >= MAX_RUNNING:
            raise Overloaded(f"{MAX_RUNNING} exports are running already: wait for one of them.")
        export_id = secrets.token_urlsafe(12)
        path = self._folder / f"{export_id}.{format_name}"
        export = self._exports[export_id] = Export(export_id, format_name, about, path, unix_now_ms())
        export.task = asyncio.create_task(self._run(export, view), name=f"export {export_id}")
        return export

    def all(self) -> list[Export]:
        """Return all known exports, the newest first."""
        self._forget_old()
        return list(reversed(self._exports.values()))

    def get(self, export_id: str) -> Export:
        """Return an export. Raises UnknownUrl."""
        self._forget_old()
        if export_id not in self._exports:
            raise UnknownUrl("There is no such export on this gateway; exports are kept for an hour.")
        return self._exports[export_id]

    async def _run(self, export: Export, view: View) -> None:
        try:
            (found,) = await self._read(lambda connection: totals(connection, view.window, where=view.filters))
            export.expected_rows = min(found.requests, MAX_ROWS)
            await self._write_all(export, view)
            export.size_bytes = export.path.stat().st_size
            export.state = "done"
        except Exception:
            log.exception("export %s failed", export.export_id)
            export.state = "failed"
            export.path.unlink(missing_ok=True)
        finally:
            export.ended_s = time.monotonic()
            export.expires_unix_ms = int((time.time() + KEPT_S) * 1000)

    async def _write_all(self, export: Export, view: View) -> None:
        # In one thread: opening may import a large library, and who is cancelled leaves a page behind, which is still
        # being written when the file is to be closed.
        thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="export")
        in_thread = partial(asyncio.get_running_loop().run_in_executor, thread)
        try:
            writer = await in_thread(_open, export)
            try:
                async for page in self._pages(export, view):
                    await in_thread(writer.write, page.requests)
            finally:
                await in_thread(writer.close)
        finally:
            thread.shutdown(wait=False)

    async def _pages(self, export: Export, view: View) -> AsyncIterator[Page]:
        """Iterate over what is to be written, and count it once it is."""
        after: Cursor | None = None

        async def next_page(connection: AsyncConnection) -> Page:
            limit = min(self._page_rows, MAX_ROWS - export.rows)
            return await request_page(
                connection, view.since_unix_ms, view.until_unix_ms, where=view.filters, after=after, limit=limit
            )

        while True:
            page = await self._read(next_page)
            yield page
            export.rows += len(page.requests)
            after = page.next
            export.is_cut = after is not None and export.rows >= MAX_ROWS
            if after is None or export.is_cut:
                return

    async def _read(self, ask: Callable[[AsyncConnection], Awaitable[_Answer]]) -> _Answer:
        """Query until the ledger answers, at most ``MAX_TRIES`` times, so ``ask`` must be read-only."""
        for _ in range(MAX_TRIES - 1):
            try:
                return await self._reader.read(ask)
            except _AWAY as error:
                log.info("export is waiting for the ledger: %s", describe(error))
                await asyncio.sleep(self._try_again_s)
        return await self._reader.read(ask)

    def _forget_old(self) -> None:
        now_s = time.monotonic()
        over = [export for export in self._exports.values() if export.ended_s is not None]
        surplus = len(self._exports) - MAX_KEPT
        for index, export in enumerate(over):
            if index < surplus or now_s - (export.ended_s or 0) >= KEPT_S:
                export.path.unlink(missing_ok=True)
                del self._exports[export.export_id]


def _open(export: Export) -> RowWriter:
    """Open the file of an export. Raises OSError."""
    _remove_leftovers(export.path.parent)
    export.path.parent.mkdir(parents=True, exist_ok=True)
    return FORMATS[export.format_name].open_writer(export.path)


def _remove_leftovers(folder: Path) -> None:
    """Delete files of dead processes, whose links are lost. Files of running gateways are younger."""
    for path in folder.glob("*"):
        with contextlib.suppress(OSError):
            if time.time() - path.stat().st_mtime > STALE_FILE_S:
                path.unlink()
