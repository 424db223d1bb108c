"""Real SQLite, in memory and without threads, behind SQLAlchemy's interface to aiosqlite, on the loop's thread.

aiosqlite runs each statement in a thread, whose timing the seed does not decide. Here statements run at once, and a
commit takes simulated time before and after it, so that a crash may fall on either side. The SQL is the product's. Only
one transaction runs at a time; others wait, as SQLite's writers do. Not covered: concurrent readers, and the atomicity
and durability of SQLite's commits.
"""

import asyncio
import sqlite3
from typing import TYPE_CHECKING, Any, Self

from sqlalchemy import event
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine
from sqlalchemy.pool import NullPool

from db.engine import _begin_sqlite
from db.tables import Base
from tests.simulation.virtual_time import CURRENT, Process

if TYPE_CHECKING:
    from tests.simulation.world import World

COMMIT_S = (0.001, 0.01)
LOCK_LIMIT_S = 5.0  # as db.engine.LOCK_LIMIT_S
LOCK_LOOK_S = 0.002


class Database:
    """One database, on a disk that outlives its writers."""

    current: "Database"  # of the running simulation

    def __init__(self, world: "World") -> None:
        self.world = world
        self.is_away = False
        self.writer: _Connection | None = None  # of the running transaction
        self.raw = sqlite3.connect(":memory:", isolation_level=None, check_same_thread=False)
        self.raw.deserialize(_template())
        Database.current = self

    def forget_the_dead(self) -> None:
        """Release the lock of a writer that died in the middle of a transaction."""
        if self.writer is not None and self.writer.is_dead:
            self.raw.rollback()
            self.writer = None

    def rows(self, statement: str, *values: Any) -> list[dict[str, Any]]:
        cursor = self.raw.execute(statement, values)
        names = [column[0] for column in cursor.description]
        return [dict(zip(names, row, strict=True)) for row in cursor.fetchall()]

    def close(self) -> None:
        self.raw.close()


class _Cursor:
    def __init__(self, connection: "_Connection") -> None:
        self._connection = connection
        self._cursor = connection.database.raw.cursor()
        self.arraysize = 1

    async def __aenter__(self) -> Self:
        return self

    @property
    def description(self) -> Any:
        return self._cursor.description

    @property
    def rowcount(self) -> int:
        return self._cursor.rowcount

    @property
    def lastrowid(self) -> int:
        return self._cursor.lastrowid or 0

    async def execute(self, statement: str, parameters: Any = ()) -> "_Cursor":
        if statement.startswith("BEGIN"):
            await self._connection.begin()
        self._connection.check()
        self._cursor.execute(statement, parameters)
        return self

    async def executemany(self, statement: str, parameters: Any) -> "_Cursor":
        self._connection.check()
        self._cursor.executemany(statement, parameters)
        return self

    async def fetchall(self) -> list[Any]:
        return self._cursor.fetchall()

    async def close(self) -> None:
        self._cursor.close()


class _Connection:
    """Replaces aiosqlite's connection for one transaction of one process."""

    def __init__(self, database: Database, process: Process | None) -> None:
        self.database = database
        self._process = process
        self._connection = self
        self.isolation_level = None

    @property
    def is_dead(self) -> bool:
        return self._process is not None and self._process.is_dead

    def check(self) -> None:
        if self.database.is_away or self.is_dead:
            raise sqlite3.OperationalError("the simulated database is away")

    async def begin(self) -> None:
        """Wait for the lock."""
        for _ in range(int(LOCK_LIMIT_S / LOCK_LOOK_S)):
            self.check()
            self.database.forget_the_dead()
            if self.database.writer is None:
                self.database.writer = self
                return
            await asyncio.sleep(LOCK_LOOK_S)
        raise sqlite3.OperationalError("database is locked")

    def _end(self) -> None:
        if self.database.writer is self:
            self.database.writer = None

    def cursor(self) -> _Cursor:
        return _Cursor(self)

    async def _pause(self) -> None:
        if self._process is not None:
            await asyncio.sleep(self.database.world.rng.uniform(*COMMIT_S))

    async def commit(self) -> None:
        await self._pause()
        self.check()
        if self.database.writer is self:
            self.database.raw.commit()
            self._end()
        await self._pause()

    async def rollback(self) -> None:
        if self.database.writer is self and self.database is Database.current:
            self.database.raw.rollback()
            self._end()

    async def close(self) -> None:
        await self.rollback()

    def stop(self) -> None:
        return

    async def create_function(self, *args: Any, **rest: Any) -> None:
        self.database.raw.create_function(*args, **rest)


async def _connect(*_args: Any, **_rest: Any) -> _Connection:
    return _Connection(Database.current, CURRENT.get())


_kept: dict[str, Any] = {}


def _template() -> bytes:
    """Return an empty database with the schema."""
    if "template" not in _kept:
        raw = sqlite3.connect(":memory:")
        engine = create_async_engine("sqlite+aiosqlite://", poolclass=NullPool).sync_engine
        from sqlalchemy.schema import CreateIndex, CreateTable

        for table in Base.metadata.sorted_tables:
            raw.execute(str(CreateTable(table).compile(dialect=engine.dialect)))
            for index in sorted(table.indexes, key=lambda one: str(one.name)):
                raw.execute(str(CreateIndex(index).compile(dialect=engine.dialect)))
        raw.commit()
        _kept["template"] = bytes(raw.serialize())
        raw.close()
    template: bytes = _kept["template"]
    return template


def engine() -> AsyncEngine:
    """Return the engine of all simulations, with its compiled statements; transactions use the current database."""
    if "engine" not in _kept:
        made = create_async_engine("sqlite+aiosqlite://", async_creator=_connect, poolclass=NullPool)
        event.listen(made.sync_engine, "begin", _begin_sqlite)
        _kept["engine"] = made
    kept: AsyncEngine = _kept["engine"]
    return kept
