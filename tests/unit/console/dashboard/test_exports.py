"""Exports hold every row once, whatever the ledger does meanwhile."""

import asyncio
import csv
import os
import threading
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, Literal

import pytest
from sqlalchemy.ext.asyncio import AsyncConnection

from console.dashboard import exports
from console.dashboard.export_files import FORMATS, FileFormat, RowWriter
from console.dashboard.exports import STALE_FILE_S, Export, Exports
from console.dashboard.reader import Reader
from console.dashboard.view import make_view
from db.engine import create_engine
from gateway.errors import LedgerUnavailable
from ledger.store import store_records
from tests.usage_records import request_record
from tests.waiting import HANGS_S

RECEIVED_UNIX_MS = 1_800_000_000_000
VIEW = make_view({"since": str(RECEIVED_UNIX_MS), "until": str(RECEIVED_UNIX_MS + 1000)}, {})


class Troubled(Reader):
    """A ledger that fails every second time: before it is asked, or with the answer on its way."""

    def __init__(self, database_url: str, trouble: Literal["none", "away", "lost"]) -> None:
        super().__init__(database_url)
        self._trouble = trouble
        self._asked = 0

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


async def done(export: Export) -> list[dict[str, str]]:
    assert export.task is not None
    async with asyncio.timeout(HANGS_S):
        await export.task
    assert export.state == "done"
    with export.path.open(newline="") as file:
        return list(csv.DictReader(file))


@pytest.mark.parametrize("trouble", ["none", "away", "lost"])
async def test_every_row_is_there_once(
    url_of_rows: str, tmp_path: Path, trouble: Literal["none", "away", "lost"]
) -> None:
    async with Troubled(url_of_rows, trouble) as reader:
        started = Exports(reader, tmp_path / "exports", page_rows=10, try_again_s=0.0).start(VIEW, "csv", "all")
        found = await done(started)
    assert [row["request_id"] for row in found] == [f"r{n}" for n in reversed(range(25))]
    # What a spreadsheet would run is a text.
    assert [row["key_name"] for row in found[-3:]] == ["k", "'@x", "'=1+1"]


async def test_a_library_is_not_loaded_in_the_loop(
    url_of_rows: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads = []

    def open_writer(path: Path) -> RowWriter:
        threads.append(threading.current_thread())
        return FORMATS["csv"].open_writer(path)

    monkeypatch.setattr(exports, "FORMATS", {"slow": FileFormat("Slow", "text/csv", open_writer)})
    async with Reader(url_of_rows) as reader:
        await done(Exports(reader, tmp_path / "exports").start(VIEW, "slow", "all"))
    assert threads
    assert threading.main_thread() not in threads


async def test_only_what_nobody_knows_any_more_is_removed(url_of_rows: str, tmp_path: Path) -> None:
    """Gateways may share a data folder: one that starts leaves the others their exports."""
    another, left = tmp_path / "another.csv", tmp_path / "left.csv"
    for path, age_s in ((another, STALE_FILE_S - 60), (left, STALE_FILE_S + 60)):
        path.touch()
        os.utime(path, (time.time() - age_s,) * 2)
    async with Reader(url_of_rows) as reader:
        Exports(reader, tmp_path)
    assert (another.exists(), left.exists()) == (True, False)
