"""A backup and its restoration, as docs/deploy/runbooks.md has them, with PostgreSQL's own programs."""

import asyncio
import shlex
import subprocess
from pathlib import Path

import pytest

import migrations
from db.engine import create_engine
from ledger.check import check_rollups
from ledger.store import store_records
from tests.postgres import find_program
from tests.usage_records import attempt_record, request_record

RUNBOOKS = Path(__file__).resolve().parents[3] / "docs/deploy/runbooks.md"
REQUESTS = 20


def options_of(program: str) -> list[str]:
    """What the page gives a program of PostgreSQL's, but the user, the database and the file."""
    [line] = [
        line for line in RUNBOOKS.read_text().splitlines() if f" {program} " in line and line.startswith("docker")
    ]
    words = shlex.split(line.partition(f"{program} ")[2].replace(">", " #").replace("<", " #"), comments=True)
    ours = {"--username", "--dbname", "--maintenance-db", "postgres", "spillway"}
    return [word for word in words if word not in ours]


@pytest.mark.servers
async def test_a_restored_database_is_that_of_the_backup(postgres_url: str, tmp_path: Path) -> None:
    async def run(program: str, *arguments: str) -> None:
        command = [find_program(program), *options_of(program), *arguments]
        await asyncio.to_thread(subprocess.run, command, check=True, capture_output=True)

    async def counted() -> list[tuple[int, int]]:
        """(requests, wrong sums) by day."""
        return [(day.requests, day.wrong) for day in await check_rollups(engine)]

    dump = str(tmp_path / "spillway.dump")
    engine = create_engine(postgres_url)
    try:
        await store_records(engine, [request_record(f"r{number}") for number in range(REQUESTS)])
        await store_records(engine, [attempt_record(f"r{number}") for number in range(REQUESTS)])
        await run("pg_dump", "--file", dump, postgres_url)
        await store_records(engine, [request_record("later")])
        assert await counted() == [(REQUESTS + 1, 0)]
        await engine.dispose()
        server, _, name = postgres_url.rpartition("/")
        await run("dropdb", "--maintenance-db", f"{server}/postgres", name)
        await run("createdb", "--maintenance-db", f"{server}/postgres", name)
        await run("pg_restore", "--dbname", postgres_url, dump)
        await asyncio.to_thread(migrations.upgrade, postgres_url)
        assert await asyncio.to_thread(migrations.current, postgres_url) == migrations.head()
        assert await counted() == [(REQUESTS, 0)]
        # What the queue still held is written once the writers run, and counted once.
        await store_records(engine, [request_record("later"), request_record("r0")])
        assert await counted() == [(REQUESTS + 1, 0)]
    finally:
        await engine.dispose()
