"""The process that indexes the lines of a batch."""

import asyncio
import codecs
import contextlib
import io
import json
import sqlite3
import subprocess
import sys
import threading
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import psutil
import pytest

from gateway.batches.index import NUMBERS_AT_A_TIME, Index, IndexFailed, make_index
from gateway.batches.indexer import IndexTask, build
from gateway.batches.lines import Done, LineError
from tests.waiting import until

PATH = "/v1/completions"
LINES = b"".join(
    json.dumps({"custom_id": str(n), "method": "POST", "url": PATH, "body": {"model": "m", "prompt": "x"}}).encode()
    + b"\n"
    for n in range(100)
)


def task_in(folder: Path) -> IndexTask:
    return IndexTask(str(folder / "one.index"), PATH, {"m": "m"}, max_lines=1000, max_line_bytes=1000)


def test_a_dead_gateway_leaves_no_index_process(tmp_path: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "gateway.batches.indexer"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.close()
    process.stdin.write(msgspec.json.encode(task_in(tmp_path)) + b"\n" + LINES)
    process.stdin.close()
    assert process.wait() == 1
    assert list(tmp_path.iterdir()) == []
    assert process.stderr.read() == b""
    process.stderr.close()


def test_a_file_with_a_bom_is_accepted(tmp_path: Path) -> None:
    """Also with several BOMs: files joined by `cat`."""
    lines = [codecs.BOM_UTF8 + line for line in LINES.splitlines(keepends=True)]
    report = build(task_in(tmp_path), io.BytesIO(b"".join(lines)))
    assert (report.total, report.errors) == (100, [])
    index = Index(tmp_path / "one.index")
    texts = asyncio.run(_texts(index))
    index.close()
    assert {json.loads(text)["custom_id"] for text in texts} == {str(n) for n in range(100)}


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-16-be", "utf-32", "utf-32-le"])
def test_a_file_in_another_encoding_is_one_error(tmp_path: Path, encoding: str) -> None:
    (error,) = build(task_in(tmp_path), io.BytesIO(LINES.decode().encode(encoding))).errors
    message = "column 1: the file is UTF-16 or UTF-32; save it as UTF-8."
    assert error == LineError("invalid_json_line", message, line=1)


def test_an_open_index_has_no_file(tmp_path: Path) -> None:
    """No file is left after a crash. Indexes of dead gateways once filled the disk for a day."""
    task, source = task_in(tmp_path), tmp_path / "lines"
    source.write_bytes(LINES)
    with source.open("rb") as lines:
        assert build(task, lines).total == 100
    index = Index(Path(task.path))
    assert [path.name for path in tmp_path.iterdir()] == ["lines"]
    assert sorted(asyncio.run(_numbers(index))) == list(range(1, 101))
    index.close()


def test_every_line_is_fed_once(tmp_path: Path) -> None:
    """Lines are read in pages, ordered by prompt instead of number."""
    count = NUMBERS_AT_A_TIME + 100
    lines = [
        b'{"custom_id": "%d", "method": "POST", "url": "/v1/completions", "body": {"model": "m", "prompt": "%d"}}\n'
        % (number, number % 1000)
        for number in range(count)
    ]
    task = msgspec.structs.replace(task_in(tmp_path), max_lines=count)
    assert build(task, io.BytesIO(b"".join(lines))).errors == []
    index = Index(Path(task.path))
    numbers = asyncio.run(_numbers(index))
    index.close()
    assert numbers != sorted(numbers)
    assert sorted(numbers) == list(range(1, count + 1))


def the_indexer() -> psutil.Process:
    """Return the process that builds an index now."""
    found = []
    for child in psutil.Process().children():
        with contextlib.suppress(psutil.NoSuchProcess):  # ended, and not reaped yet
            if "gateway.batches.indexer" in child.cmdline():
                found.append(child)
    [process] = found
    return process


async def test_no_secret_is_in_its_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPILLWAY_AUTH__PEPPER", "secret")
    seen: list[dict[str, str]] = []

    async def content() -> AsyncIterator[bytes]:
        """The process runs while this is read."""
        seen.append(the_indexer().environ())
        yield LINES

    assert (await make_index(task_in(tmp_path), content())).total == 100
    assert len(seen) == 1
    assert "SPILLWAY_AUTH__PEPPER" not in seen[0]


async def test_a_process_that_dies_while_lines_arrive_is_an_error_of_the_index(tmp_path: Path) -> None:
    """Regression: the next lines met a closed pipe, and uvloop's RuntimeError came out."""

    async def content() -> AsyncIterator[bytes]:
        yield LINES
        process = the_indexer()
        process.kill()
        await until(lambda: not process.is_running() or process.status() == psutil.STATUS_ZOMBIE)
        for _ in range(100):
            yield LINES
            await asyncio.sleep(0)

    with pytest.raises(IndexFailed, match="SIGKILL"):
        await make_index(task_in(tmp_path), content())


async def _numbers(index: Index) -> list[int]:
    return [number async for number, _ in index.lines(Done())]


async def test_the_index_is_closed_after_pending_reads(tmp_path: Path) -> None:
    """SQLite crashes the process if it is closed during a read."""
    assert build(task_in(tmp_path), io.BytesIO(LINES)).total == 100
    index = Index(tmp_path / "one.index")
    is_reading, may_go_on = threading.Event(), threading.Event()

    def hold() -> None:
        is_reading.set()
        may_go_on.wait()

    index._database.set_progress_handler(hold, 1)
    reading = asyncio.create_task(_numbers(index))
    await asyncio.to_thread(is_reading.wait)
    reading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reading
    index.close()
    index._database.total_changes  # noqa: B018  # raises where it is closed
    may_go_on.set()
    await until(lambda: _is_closed(index))


def _is_closed(index: Index) -> bool:
    try:
        index._database.total_changes  # noqa: B018
    except sqlite3.ProgrammingError:
        return True
    return False


async def _texts(index: Index) -> list[bytes]:
    return [text async for _, text in index.lines(Done())]
