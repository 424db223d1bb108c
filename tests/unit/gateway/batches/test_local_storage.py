"""Local file storage: cancellation leaks nothing."""

import asyncio
import os
from pathlib import Path

import pytest

from gateway.batches.storage.local import LocalStorage


async def test_cancellation_while_opening_leaks_no_file(tmp_path: Path) -> None:
    unfinished = tmp_path / "name.part"
    os.mkfifo(unfinished)  # opening it for writing blocks until it has a reader

    async def write() -> None:
        async with LocalStorage(tmp_path).writing("name"):
            pytest.fail("it was cancelled before the file was open")

    writing = asyncio.create_task(write())
    await asyncio.sleep(0)
    writing.cancel()
    reader = await asyncio.to_thread(unfinished.open, "rb")
    with reader:
        assert await asyncio.to_thread(reader.read) == b""  # the writer has closed it
    with pytest.raises(asyncio.CancelledError):
        await writing
    assert set(await asyncio.to_thread(tmp_path.iterdir)) == set()
