"""Backups and their restoration, as docs/deploy/runbooks.md has them, with PostgreSQL's own programs."""

import asyncio
import subprocess
from pathlib import Path

import pytest

import migrations
from db.engine import create_engine
from ledger.check import check_rollups
from ledger.store import store_records
from tests.drill.archive import archiving, base_backup, close_segment, options_of, query, restore, shared_disk
from tests.postgres import PostgresServer, find_program
from tests.usage_records import attempt_record, request_record

REQUESTS = 20


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


@pytest.mark.servers
def test_the_log_restores_what_came_after_the_base_backup() -> None:
    with shared_disk() as shared:
        first, second = (PostgresServer(further_settings=archiving(shared / "wal")) for _ in range(2))
        try:
            first.create()
            first.start()
            first.execute("CREATE TABLE requests (request_id text)")
            base_backup(first, shared / "base.tar")
            first.execute("INSERT INTO requests VALUES ('archived')")
            close_segment(first, shared / "wal")
            first.execute("INSERT INTO requests VALUES ('only in the last segment')")
            first.stop(crash=True)
            restore(second, shared / "base.tar")
            assert query(second, "postgres", "SELECT string_agg(request_id, ', ') FROM requests") == "archived"
        finally:
            first.remove()
            second.remove()
