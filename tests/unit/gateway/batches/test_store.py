"""Batches in SQL: who can change their state."""

import pytest

from db.engine import create_engine
from gateway.batches.files import Part
from gateway.batches.lines import pack_numbers
from gateway.batches.store import Batch, Batches, Counts, Lost, Status


def new_batch() -> Batch:
    return Batch("batch_1", "openai", "t", "team", "k", "key", "/v1/completions", "file-1", "24h", 1, 2)


async def test_only_the_latest_holder_commits(sqlite_url: str) -> None:
    database = create_engine(sqlite_url)
    batches = Batches(database)
    await batches.add(new_batch())
    first, last = [await batches.take("batch_1", gateway) for gateway in ("frozen", "gw")]
    output_id, _ = first.result_ids
    with pytest.raises(Lost):
        await batches.commit(first, [Part(output_id, 0, "a", 3, pack_numbers([1]))], Counts(completed=1))
    await batches.commit(last, [Part(output_id, 0, "b", 3, pack_numbers([1]))], Counts(completed=1))
    found = await batches.find("batch_1")
    await database.dispose()
    assert found is not None
    assert (found.completed, found.holder) == (1, "gw")


async def test_a_finalizing_batch_cannot_be_cancelled(sqlite_url: str) -> None:
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
