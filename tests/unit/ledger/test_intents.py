"""Which intents are written and acknowledged when, and which are held back."""

from collections.abc import AsyncIterator
from typing import Any

import pytest
from sqlalchemy.ext.asyncio import AsyncEngine

from db.engine import create_engine
from ledger import intents as intents_module
from ledger.intents import Intents
from protocol.nats.pull import Delivery
from tests.usage_records import attempt_record, request_intent


@pytest.fixture
async def engine(sqlite_url: str) -> AsyncIterator[AsyncEngine]:
    engine = create_engine(sqlite_url)
    yield engine
    await engine.dispose()


def hold(intents: Intents, *sequences: int) -> None:
    for sequence in sequences:
        delivery = Delivery(b"", "usage.intent", "ack", sequence, 1, 0, 0)
        intents.hold([request_intent(f"r{sequence}")], delivery)


async def written(intents: Intents) -> list[int]:
    """The messages whose intents are due."""
    sequences: list[int] = []
    while (done := await intents.write_due()) is not None:
        sequences += [delivery.stream_sequence for delivery in done]
    return sequences


async def test_what_somebody_waits_for_is_not_held_back(engine: AsyncEngine) -> None:
    intents = Intents(engine, hold_s=600.0)
    hold(intents, 1, 2)
    assert await written(intents) == []
    intents.want(4)
    assert await written(intents) == [1, 2]
    hold(intents, 3, 5, 4, 6)  # 3 was delivered again: all before what is wanted goes with it
    assert await written(intents) == [3, 5, 4]
    intents.want(3)  # who waits for less changes nothing for those that wait for more
    assert await written(intents) == [6]
    hold(intents, 7)
    assert await written(intents) == []


async def test_attempts_that_count_as_intents_are_in_nobodys_way(
    engine: AsyncEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(intents_module, "CHUNK_REQUESTS", 2)
    intents = Intents(engine, hold_s=600.0)
    origin: dict[str, Any] = {
        "gateway_id": "g",
        "endpoint": "completions",
        "key_id": "k",
        "key_name": "n",
        "stream": True,
    }
    for number in range(5):
        intents.hold([attempt_record(f"ended{number}", **origin)], None)
    hold(intents, 1)
    intents.want(1)
    assert await written(intents) == [1]
