"""Batches in SQL: who moves one on."""

from db.engine import create_engine
from gateway.batches.store import Batch, Batches, Status


def new_batch() -> Batch:
    return Batch("batch_1", "openai", "t", "team", "k", "key", "/v1/completions", "file-1", "24h", 1, 2)


async def test_a_batch_whose_lines_are_done_cannot_be_cancelled(sqlite_url: str) -> None:
    database = create_engine(sqlite_url)
    batches = Batches(database)
    await batches.add(new_batch())
    taken = await batches.take("batch_1", "gw")
    await batches.start(taken, 1, {})
    await batches.finalizing(taken)
    await batches.ask_to_cancel("batch_1")
    found = await batches.find("batch_1")
    await database.dispose()
    assert found is not None
    assert (found.status, found.cancelling_unix_ms) == (Status.FINALIZING, None)
