"""``spillway usage``, as typed."""

import asyncio
import csv
from pathlib import Path

from typer.testing import CliRunner

from db.engine import create_engine
from ledger.store import store_records
from spillway.cli import app
from tests.usage_records import request_record


async def fill(database_url: str) -> None:
    engine = create_engine(database_url)
    records = [
        request_record(str(n), key_id=f"key_{n}", key_name=name) for n, name in enumerate(("=1+1", "-a;=b", "k"))
    ]
    await store_records(engine, records)
    await engine.dispose()


def test_what_a_spreadsheet_would_run_is_a_text(sqlite_url: str, tmp_path: Path) -> None:
    asyncio.run(fill(sqlite_url))
    arguments = ["usage", "--format", "csv", "--by", "key", "--data", str(tmp_path)]
    done = CliRunner().invoke(app, arguments, env={"SPILLWAY_DATABASE__URL": sqlite_url})
    assert done.exit_code == 0, done.stderr
    rows = list(csv.DictReader(done.stdout.splitlines()))
    assert {row["key_name"] for row in rows} == {"'=1+1", "'-a;'=b", "k"}
    assert {row["requests"] for row in rows} == {"1"}
