"""An index of a batch's lines in a SQLite file: validates lines and returns them in feeding order.

A separate process (``python -m gateway.batches.index``) builds it, so that millions of lines are parsed and sorted
on disk, with little memory, without blocking the gateway. A gateway that takes over a batch rebuilds it.
"""

import asyncio
import codecs
import hashlib
import os
import sqlite3
import sys
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from functools import partial
from pathlib import Path
from typing import IO, Final

import msgspec
from msgspec import Struct

from gateway.batches.lines import Done, LineError, Request, Wrong, check_line, is_wide, prompt_text, sort_key
from protocol.process import ending, plain_environment, write_to

MAX_ERRORS: Final = 100  # reported per batch
ID_BYTES: Final = 16  # of the hash of a custom_id
CACHE_KIB: Final = 16 * 1024
INSERTED_AT_A_TIME: Final = 500
NUMBERS_AT_A_TIME: Final = 4096
LINES_AT_A_TIME: Final = 32
NICENESS: Final = 10
SPACE: Final = b" \t\r\n"
NO_ROOM: Final = 75  # exit code: not the fault of the batch (EX_TEMPFAIL of sysexits.h)
LIMIT_S: Final = 1800.0  # per file


class IndexTask(Struct, frozen=True):
    """Input of the process, followed by the file."""

    path: str
    endpoint: str
    models: dict[str, str]  # allowed model names, with the configured model of each
    max_lines: int
    max_line_bytes: int
    any_model: bool = False  # see check_line


class IndexReport(Struct):
    """Result of the process."""

    total: int = 0
    models: dict[str, tuple[int, int]] = {}  # lines and estimated tokens by model
    errors: list[LineError] = []


_decode_task: Final = msgspec.json.Decoder(IndexTask).decode
_decode_report: Final = msgspec.json.Decoder(IndexReport).decode


class IndexFailed(Exception):
    """The process failed, possibly because of the file's content."""


class NoRoomForIndex(Exception):
    """The gateway has no disk space for an index at the moment. The file is not at fault."""


# --- the process ------------------------------------------------------------------------------------------------------


def build(task: IndexTask, source: IO[bytes]) -> IndexReport:
    """Build the index of a file. If a line is invalid, the report has errors and the index is unusable."""
    path = Path(task.path)
    unfinished = _unfinished(path, os.getpid())
    report = IndexReport(models={}, errors=[])
    try:
        with closing(sqlite3.connect(unfinished, isolation_level=None)) as database:
            for pragma in ("journal_mode=OFF", "synchronous=OFF", f"cache_size=-{CACHE_KIB}", "temp_store=FILE"):
                database.execute(f"PRAGMA {pragma}")
            database.execute("CREATE TABLE lines (number INTEGER PRIMARY KEY, sort_key BLOB, id BLOB, text BLOB)")
            database.execute("BEGIN")
            _insert(task, source, database, report)
            if not report.errors:
                _find_duplicates(database, report)
            if not report.errors:
                database.execute("CREATE INDEX feeding ON lines (sort_key, number)")
            database.execute("COMMIT")
        if not report.errors:
            unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)
    return report


def _unfinished(path: Path, process_id: int) -> Path:
    return path.with_suffix(f".{process_id}.part")


def _insert(task: IndexTask, source: IO[bytes], database: sqlite3.Connection, report: IndexReport) -> None:
    rows: list[tuple[int, bytes, bytes, bytes]] = []
    for number, line in enumerate(_lines(source, task.max_line_bytes), start=1):
        if number == 1 and is_wide(line):
            message = "column 1: the file is UTF-16 or UTF-32; save it as UTF-8."
            report.total = 1
            report.errors.append(LineError("invalid_json_line", message, line=1))
            break
        text = line.removeprefix(codecs.BOM_UTF8)
        if not text.strip(SPACE):
            continue
        report.total += 1
        if report.total > task.max_lines:
            message = f"A batch may have at most {task.max_lines} lines."
            report.errors.append(LineError("too_many_lines", message, line=number))
            break
        try:
            request = _checked(text, task)
        except Wrong as wrong:
            report.errors.append(LineError(wrong.code, str(wrong), wrong.param, number))
            if len(report.errors) >= MAX_ERRORS:
                break
            continue
        lines, tokens = report.models.get(request.model, (0, 0))
        report.models[request.model] = (lines + 1, tokens + request.estimated_tokens)
        identity = hashlib.blake2b(request.custom_id.encode(), digest_size=ID_BYTES).digest()
        rows.append((number, sort_key(request.model, prompt_text(request.body)), identity, text))
        if len(rows) >= INSERTED_AT_A_TIME:
            database.executemany("INSERT INTO lines VALUES (?, ?, ?, ?)", rows)
            rows.clear()
    database.executemany("INSERT INTO lines VALUES (?, ?, ?, ?)", rows)
    if not report.total:
        report.errors.append(LineError("empty_file", "The input file has no lines."))


def _checked(text: bytes, task: IndexTask) -> Request:
    if len(text) > task.max_line_bytes:
        raise Wrong("line_too_large", f"A line may have at most {task.max_line_bytes} bytes.")
    return check_line(text, task.endpoint, task.models, any_model=task.any_model)


def _lines(source: IO[bytes], max_bytes: int) -> Iterator[bytes]:
    """Iterate over lines. Lines above the limit are truncated just past it."""
    while line := source.readline(max_bytes + 1):
        yield line
        while len(line) > max_bytes and not line.endswith(b"\n"):
            line = source.readline(max_bytes)
            if not line or line.endswith(b"\n"):
                break
            line = line.ljust(max_bytes + 1)


def _find_duplicates(database: sqlite3.Connection, report: IndexReport) -> None:
    again = "SELECT number, LAG(number) OVER (PARTITION BY id ORDER BY number) AS first FROM lines"
    found = database.execute(f"SELECT number, first FROM ({again}) WHERE first IS NOT NULL LIMIT {MAX_ERRORS}")  # noqa: S608
    report.errors += [
        LineError("duplicate_custom_id", f"Line {first} has the same custom_id.", "custom_id", number)
        for number, first in sorted(found)
    ]


def main() -> None:
    """Read a task, build the index, and write the report."""
    os.nice(NICENESS)
    task = _decode_task(sys.stdin.buffer.readline())
    os.environ["SQLITE_TMPDIR"] = str(Path(task.path).parent)
    try:
        report = build(task, sys.stdin.buffer)
    except (OSError, sqlite3.OperationalError) as error:  # no disk space, or no permission
        sys.stderr.write(f"{type(error).__name__}: {error}\n")
        sys.exit(NO_ROOM)
    while sys.stdin.buffer.read(1024 * 1024):  # drain the rest of the input
        pass
    try:
        sys.stdout.buffer.write(msgspec.json.encode(report))
        sys.stdout.buffer.flush()
    except BrokenPipeError:  # the gateway has died
        Path(task.path).unlink(missing_ok=True)
        os._exit(1)  # skip Python's flush at exit


# --- the gateway's side -----------------------------------------------------------------------------------------------


async def make_index(task: IndexTask, content: AsyncIterator[bytes]) -> IndexReport:
    """Build an index in a process. Raises IndexFailed, NoRoomForIndex, and the errors of ``content``."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-P", "-m", "gateway.batches.index",
        env=plain_environment(),  # it parses untrusted input
        stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
        start_new_session=True,
    )  # fmt: skip
    assert process.stdin is not None  # noqa: S101  # for mypy
    limit = asyncio.timeout(LIMIT_S)
    try:
        async with limit:
            with suppress(ConnectionError):  # it has died: its error output is read below
                await write_to(process.stdin, msgspec.json.encode(task) + b"\n")
                async for chunk in content:
                    await write_to(process.stdin, chunk)
            process.stdin.close()
            answer, words = await process.communicate()
    except TimeoutError as error:
        if not limit.expired():
            raise
        raise IndexFailed(f"the lines were not indexed within {LIMIT_S:.0f} s") from error
    finally:
        if process.returncode is None:
            with suppress(ProcessLookupError):
                process.kill()
            await process.wait()
            _unfinished(Path(task.path), process.pid).unlink(missing_ok=True)
    if process.returncode:
        last_words = words.decode(errors="replace").strip()[-500:]
        kind = NoRoomForIndex if process.returncode == NO_ROOM else IndexFailed
        raise kind(f"the lines could not be indexed ({ending(process.returncode)}): {last_words}")
    return _decode_report(answer)


class Index:
    """An open index. Its file is already unlinked, so it disappears with the process.

    One thread does all reading and closes the database: a canceled task may leave a read running, and SQLite crashes
    if it is closed during a read.
    """

    def __init__(self, path: Path) -> None:
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="batch-index")
        self._database = sqlite3.connect(f"file:{path}?mode=ro&immutable=1", uri=True, check_same_thread=False)
        self._database.execute("PRAGMA cache_size=-4096")
        self._database.execute("SELECT name FROM sqlite_master").fetchall()  # SQLite opens the file only now
        path.unlink()

    async def lines(self, done: Done) -> AsyncIterator[tuple[int, bytes]]:
        """Iterate over incomplete lines with their numbers, in feeding order."""
        in_thread = partial(asyncio.get_running_loop().run_in_executor, self._thread)
        mark: tuple[bytes, int] = (b"", 0)
        while numbers := await in_thread(self._numbers, mark):
            mark = numbers[-1]
            wanted = [number for _, number in numbers if number not in done]
            for start in range(0, len(wanted), LINES_AT_A_TIME):
                for line in await in_thread(self._texts, wanted[start : start + LINES_AT_A_TIME]):
                    yield line

    def _numbers(self, mark: tuple[bytes, int]) -> list[tuple[bytes, int]]:
        later = "SELECT sort_key, number FROM lines WHERE (sort_key, number) > (?, ?) ORDER BY sort_key, number LIMIT ?"
        return self._database.execute(later, (*mark, NUMBERS_AT_A_TIME)).fetchall()

    def _texts(self, numbers: list[int]) -> list[tuple[int, bytes]]:
        one_by_one = "SELECT text FROM lines WHERE number = ?"
        return [(number, self._database.execute(one_by_one, (number,)).fetchone()[0]) for number in numbers]

    def close(self) -> None:
        """Close the index after pending reads."""
        self._database.interrupt()
        self._thread.submit(self._database.close)
        self._thread.shutdown(wait=False)


if __name__ == "__main__":
    main()
