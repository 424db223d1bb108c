"""Exports hold every row once, whatever the ledger does meanwhile."""

import asyncio
import csv
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from typing import Any, Literal

import pytest
from sqlalchemy.ext.asyncio import AsyncConnection

from console.dashboard import exports
from console.dashboard.export_files import FORMATS, FileFormat, RowWriter, Sink
from console.dashboard.exports import MAX_RUNNING, Exports
from console.dashboard.reader import Reader
from console.dashboard.view import make_view
from db.engine import create_engine
from gateway.errors import LedgerUnavailable, Overloaded
from ledger.store import store_records
from tests.usage_records import request_record
from tests.waiting import HANGS_S, until

RECEIVED_UNIX_MS = 1_800_000_000_000
VIEW = make_view({"since": str(RECEIVED_UNIX_MS), "until": str(RECEIVED_UNIX_MS + 1000)}, {})


class Troubled(Reader):
    """A ledger that fails every second time, or first: before it is asked, or with the answer on its way."""

    def __init__(self, database_url: str, trouble: Literal["none", "away", "lost"], first_bad: int = 1) -> None:
        super().__init__(database_url)
        self._trouble = trouble
        self._asked = first_bad

    async def read(self, ask: Callable[[AsyncConnection], Awaitable[Any]], limit_s: float = 15.0) -> Any:
        self._asked += 1
        is_bad = self._asked % 2
        if is_bad and self._trouble == "away":
            raise ConnectionRefusedError
        answer = await super().read(ask, limit_s)
        if is_bad and self._trouble == "lost":
            raise LedgerUnavailable
        return answer


@pytest.fixture
async def url_of_rows(sqlite_url: str) -> str:
    engine = create_engine(sqlite_url)
    named = {0: "=1+1", 1: "@x"}
    rows = [
        request_record(f"r{n}", received_unix_ms=RECEIVED_UNIX_MS + n, key_name=named.get(n, "k")) for n in range(25)
    ]
    await store_records(engine, rows)
    await engine.dispose()
    return sqlite_url


async def rows_of(parts: AsyncIterator[bytes]) -> list[dict[str, str]]:
    async with asyncio.timeout(HANGS_S):
        text = b"".join([part async for part in parts]).decode()
    return list(csv.DictReader(text.splitlines()))


@pytest.mark.parametrize("trouble", ["none", "away", "lost"])
async def test_every_row_is_there_once(url_of_rows: str, trouble: Literal["none", "away", "lost"]) -> None:
    async with Troubled(url_of_rows, trouble) as reader:
        found = await rows_of(await Exports(reader, page_rows=10, try_again_s=0.0).start(VIEW, "csv"))
    assert [row["request_id"] for row in found] == [f"r{n}" for n in reversed(range(25))]
    # What a spreadsheet would run is a text.
    assert [row["key_name"] for row in found[-3:]] == ["k", "'@x", "'=1+1"]


async def test_a_file_is_there_in_parts_before_all_is_read(url_of_rows: str) -> None:
    async with Troubled(url_of_rows, "none") as reader:
        parts = await Exports(reader, page_rows=10).start(VIEW, "parquet")
        sizes = [len(part) async for part in parts]
    assert len(sizes) == 3
    assert all(sizes)


async def test_a_ledger_that_does_not_answer_at_once_is_an_error_and_not_a_broken_file(url_of_rows: str) -> None:
    async with Troubled(url_of_rows, "away", first_bad=0) as reader:
        exports = Exports(reader, try_again_s=0.0)
        for _ in range(2 * MAX_RUNNING):  # none of them counts as running
            with pytest.raises(ConnectionRefusedError):
                await exports.start(VIEW, "csv")
            await rows_of(await exports.start(VIEW, "csv"))


async def test_there_is_room_again_for_whoever_follows_one_that_left(url_of_rows: str) -> None:
    async with Reader(url_of_rows) as reader:
        exports = Exports(reader, page_rows=10)
        for _ in range(3):
            running = [await exports.start(VIEW, "csv") for _ in range(MAX_RUNNING)]
            with pytest.raises(Overloaded):
                await exports.start(VIEW, "csv")
            for number, parts in enumerate(running):
                assert isinstance(parts, AsyncGenerator)
                if number:  # the other one has not read any of it
                    await anext(parts)
            del running, parts
            await until(lambda: not exports._running)


async def test_a_library_is_not_loaded_in_the_loop(url_of_rows: str, monkeypatch: pytest.MonkeyPatch) -> None:
    threads = []

    def open_writer(sink: Sink) -> RowWriter:
        threads.append(threading.current_thread())
        return FORMATS["csv"].open_writer(sink)

    monkeypatch.setattr(exports, "FORMATS", {"slow": FileFormat("Slow", "text/csv", open_writer)})
    async with Reader(url_of_rows) as reader:
        await rows_of(await Exports(reader).start(VIEW, "slow"))
    assert threads
    assert threading.main_thread() not in threads
