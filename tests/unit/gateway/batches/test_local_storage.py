"""Local file storage: cancellation leaks nothing."""

import asyncio
import os
from pathlib import Path

import pytest

from gateway.batches.storage.local import LocalStorage


async def _write(folder: Path) -> None:
    async with LocalStorage(folder).writing("name"):
        pytest.fail("it was cancelled before the file was open")


async def _read(folder: Path) -> None:
    async for _ in LocalStorage(folder).read("name"):
        pytest.fail("it was cancelled before the file was open")


async def test_cancellation_while_opening_to_write_leaks_no_file(tmp_path: Path) -> None:
    unfinished = tmp_path / "name.part"
    os.mkfifo(unfinished)  # opening it for writing blocks until it has a reader
    writing = asyncio.create_task(_write(tmp_path))
    await asyncio.sleep(0)
    writing.cancel()
    reader = await asyncio.to_thread(unfinished.open, "rb")
    with reader:
        assert await asyncio.to_thread(reader.read) == b""  # the writer has closed it
    with pytest.raises(asyncio.CancelledError):
        await writing
    assert set(await asyncio.to_thread(tmp_path.iterdir)) == set()


async def test_cancellation_while_opening_to_read_leaks_no_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "name")  # opening it for reading blocks until it has a writer
    reading = asyncio.create_task(_read(tmp_path))
    await asyncio.sleep(0)
    reading.cancel()
    writer = await asyncio.to_thread((tmp_path / "name").open, "wb")
    with pytest.raises(asyncio.CancelledError):
        await reading
    writer.close()  # a file that the reader had left open would be a ResourceWarning by now


async def test_cancellation_while_opening_what_cannot_be_opened(tmp_path: Path) -> None:
    (tmp_path / "name").mkdir()
    reading = asyncio.create_task(_read(tmp_path))
    await asyncio.sleep(0)
    reading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reading
