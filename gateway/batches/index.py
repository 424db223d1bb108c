"""An index of a batch's lines in a SQLite file: validates lines and returns them in feeding order.

A separate process (indexer.py) builds it, so that millions of lines are parsed and sorted on disk, with little memory,
without blocking the gateway. A gateway that takes over a batch rebuilds it.
"""

import asyncio
import sqlite3
import sys
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Final

import msgspec

from gateway.batches.indexer import NO_ROOM, IndexReport, IndexTask, unfinished_path
from gateway.batches.lines import Done
from protocol.process import ending, plain_environment, write_to

NUMBERS_AT_A_TIME: Final = 4096
LINES_AT_A_TIME: Final = 32
LIMIT_S: Final = 1800.0  # per file
_decode_report: Final = msgspec.json.Decoder(IndexReport).decode


class IndexFailed(Exception):
    """The process failed, possibly because of the file's content."""


class NoRoomForIndex(Exception):
    """The gateway has no disk space for an index at the moment. The file is not at fault."""


async def make_index(task: IndexTask, content: AsyncIterator[bytes]) -> IndexReport:
    """Build an index in a process. Raises IndexFailed, NoRoomForIndex, and the errors of ``content``."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-P", "-m", "gateway.batches.indexer",
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
            unfinished_path(Path(task.path), process.pid).unlink(missing_ok=True)
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
