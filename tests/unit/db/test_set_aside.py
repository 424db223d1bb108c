"""Notes about set-aside items: any text can be stored, and their number is limited."""

from collections.abc import AsyncIterator

import pytest
from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncEngine

from db import set_aside as module
from db.engine import create_engine
from db.set_aside import MAX_CHARS, SetAside
from db.tables import SetAsideRow


@pytest.fixture
async def engine(database_url: str) -> AsyncIterator[AsyncEngine]:
    engine = create_engine(database_url)
    yield engine
    await engine.dispose()


async def rows(engine: AsyncEngine) -> dict[str, str]:
    async with engine.connect() as connection:
        found = await connection.execute(select(SetAsideRow.item, SetAsideRow.reason))
        return {row.item: row.reason for row in found}


async def test_texts_of_attackers_are_stored(engine: AsyncEngine) -> None:
    notes = SetAside(engine)
    notes.note("payload", "nul\0", "team", "surrogate \ud800")
    notes.note("payload", "long", "team", "x" * 10_000)
    await notes.flush()
    assert await rows(engine) == {"nul\N{REPLACEMENT CHARACTER}": "surrogate ?", "long": "x" * MAX_CHARS}


async def test_an_item_has_one_row_with_its_newest_reason(engine: AsyncEngine) -> None:
    notes = SetAside(engine)
    for reasons in (("first", "second"), ("third",)):
        for reason in reasons:
            notes.note("batch", "b", "team", reason)
        await notes.flush()
    assert await rows(engine) == {"b": "third"}
    assert await notes.counts() == {"batch": 1}


async def test_the_newest_of_each_kind_are_kept(engine: AsyncEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_ROWS", 3)
    now_ms = 0

    def clock() -> int:
        nonlocal now_ms
        now_ms += 1
        return now_ms

    monkeypatch.setattr(module, "unix_now_ms", clock)
    notes = SetAside(engine)
    notes.note("batch", "b", "", "")
    for number in range(5):
        notes.note("payload", f"p{number}", "", "")
        await notes.flush()
    assert set(await rows(engine)) == {"b", "p2", "p3", "p4"}


async def test_while_sql_is_away_notes_wait() -> None:
    away = create_engine("postgresql://nobody@127.0.0.1:1/nothing")
    notes = SetAside(away)
    notes.note("payload", "p", "", "")
    await notes.flush()
    assert await notes.counts() is None
    assert len(notes._waiting) == 1
    await away.dispose()
