import threading
from pathlib import Path

import pytest
from sqlalchemy import text
from sqlalchemy.exc import OperationalError

from db.engine import DatabaseUrlError, create_engine, parse_database_url


@pytest.mark.parametrize(
    ("given", "driver"),
    [
        ("sqlite:///data/x.db", "sqlite+aiosqlite"),
        ("sqlite+aiosqlite:////abs/x.db", "sqlite+aiosqlite"),
        ("postgresql://user@host/db", "postgresql+asyncpg"),
        ("postgres://user@host/db", "postgresql+asyncpg"),
        ("postgresql+asyncpg://user@host/db", "postgresql+asyncpg"),
    ],
)
def test_plain_urls_get_their_async_driver(given: str, driver: str) -> None:
    assert parse_database_url(given).drivername == driver


@pytest.mark.parametrize(
    "given",
    ["", "spillway.db", "mysql://user:secret@host/db", "sqlite://", "sqlite:///:memory:", "postgresql://h:port/d"],
)
def test_an_unusable_url_is_an_error_that_names_its_key(given: str) -> None:
    with pytest.raises(DatabaseUrlError, match=r"^database\.url: ") as refused:
        create_engine(given)
    assert "secret" not in str(refused.value)


async def test_sqlite_is_set_up_for_several_processes_and_power_cuts(sqlite_url: str) -> None:
    engine = create_engine(sqlite_url)
    async with engine.connect() as connection:
        found = {
            name: (await connection.execute(text(f"PRAGMA {name}"))).scalar()
            for name in ("journal_mode", "synchronous", "foreign_keys", "busy_timeout")
        }
    await engine.dispose()
    assert found == {"journal_mode": "wal", "synchronous": 2, "foreign_keys": 1, "busy_timeout": 5000}


async def test_a_rolled_back_transaction_leaves_nothing_not_even_a_table(database_url: str) -> None:
    # Python's sqlite3 would commit the CREATE TABLE at once.
    engine = create_engine(database_url)
    async with engine.connect() as connection:
        await connection.execute(text("CREATE TABLE gone (x INTEGER)"))
        await connection.rollback()
        await connection.execute(text("CREATE TABLE gone (x INTEGER)"))
    await engine.dispose()


async def test_a_file_that_cannot_be_opened_leaves_no_thread(tmp_path: Path) -> None:
    engine = create_engine(f"sqlite:///{tmp_path}/no/folder.db")
    for _ in range(5):
        with pytest.raises(OperationalError, match="unable to open"):
            await engine.connect()
        names = [thread.name for thread in threading.enumerate()]
        assert not any("_connection_worker_thread" in name for name in names), names
    await engine.dispose()
