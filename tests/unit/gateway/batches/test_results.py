"""Writing results in parts."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from db.engine import create_engine
from gateway.batches.results import Results
from gateway.batches.storage.base import Writer
from gateway.batches.storage.local import LocalStorage
from gateway.batches.store import Batch, Batches, Counts
from protocol.nats.clock import unix_now_ms
from tests.waiting import HANGS_S


class SlowStorage(LocalStorage):
    """Completes a file only after permission."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.begun = asyncio.Event()
        self.may_end = asyncio.Event()

    @asynccontextmanager
    async def writing(self, name: str) -> AsyncIterator[Writer]:
        async with super().writing(name) as writer:
            yield writer
            self.begun.set()
            await self.may_end.wait()


async def test_the_last_line_arrives_while_a_part_is_written(sqlite_url: str, tmp_path: Path) -> None:
    """This once aborted the write, and all lines of the part ran a second time."""
    database, storage = create_engine(sqlite_url), SlowStorage(tmp_path / "files")
    batches = Batches(database)
    now_ms = unix_now_ms()
    new = Batch("batch_1", "openai", "t", "team", "k", "key", "/v1/completions", "file-1", "24h", now_ms, now_ms)
    await batches.add(new)
    results = Results(
        batches, storage, await batches.take(new.id, "gw"), next_number=0, commit_s=0.01, committed=lambda _: None
    )
    running = asyncio.create_task(results.run())
    results.add(1, b"first\n", Counts(completed=1))
    async with asyncio.timeout(HANGS_S):
        await storage.begun.wait()
        results.add(2, b"last\n", Counts(completed=1))
        results.end()
        storage.may_end.set()
        await running
    done, _ = await batches.done(new)
    await database.dispose()
    assert (1 in done, 2 in done, done.count) == (True, True, 2)
