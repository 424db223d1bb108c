"""The process that builds the index of a batch's lines: ``python -m gateway.batches.indexer``.

It starts for each batch, so it imports little: not pydantic, for one.
"""

import codecs
import hashlib
import os
import sqlite3
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import IO, Final

import msgspec
from msgspec import Struct

from gateway.batches.lines import LineError, Request, Wrong, check_line, is_wide, prompt_text, sort_key

MAX_ERRORS: Final = 100  # reported per batch
ID_BYTES: Final = 16  # of the hash of a custom_id
CACHE_KIB: Final = 16 * 1024
INSERTED_AT_A_TIME: Final = 500
NICENESS: Final = 10
SPACE: Final = b" \t\r\n"
NO_ROOM: Final = 75  # exit code: not the fault of the batch (EX_TEMPFAIL of sysexits.h)


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


def build(task: IndexTask, source: IO[bytes]) -> IndexReport:
    """Build the index of a file. If a line is invalid, the report has errors and the index is unusable."""
    path = Path(task.path)
    unfinished = unfinished_path(path, os.getpid())
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


def unfinished_path(path: Path, process_id: int) -> Path:
    """Return where that process writes an index that will be at ``path``."""
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


if __name__ == "__main__":
    main()
