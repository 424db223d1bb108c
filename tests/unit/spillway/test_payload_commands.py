"""``spillway payloads`` and ``spillway export finetune``, as typed."""

import asyncio
import json
from pathlib import Path

import pytest
from pydantic import SecretStr
from sqlalchemy import update
from typer.testing import CliRunner, Result

from db.accounts.keys import Grant, create_key, list_keys
from db.accounts.principal import DEFAULT_TEAM_ID, Policy
from db.engine import create_engine
from db.tables import ApiKeyRow
from ledger.payloads.sealing import Sealer
from ledger.payloads.store import store_payloads
from ledger.store import store_records
from spillway.cli import app
from tests.payload_records import payload_record
from tests.usage_records import request_record

KEY = b"k" * 32


async def fill(database_url: str) -> str:
    """Two payloads of one key, in a database; returns the key's id."""
    engine = create_engine(database_url)
    grant = Grant(policy=Policy(log_payload=True, train_ok=True))
    key, _ = await create_key(engine, "the key", SecretStr("p" * 64), grant)
    for name, user in (("a", "ann"), ("b", "bob")):
        request = {"messages": [{"role": "user", "content": f"I am {user}"}]}
        choice = {"index": 0, "message": {"role": "assistant", "content": "Hi"}, "finish_reason": "stop"}
        fields = {"key_id": key.key_id, "team_id": DEFAULT_TEAM_ID, "end_user": user, "received_unix_ms": 10**12}
        sealed = payload_record(name, request=request, answer={"choices": [choice]}, sealer=Sealer([KEY]), **fields)
        await store_payloads(engine, [sealed])
        await store_records(engine, [request_record(name)])
    await engine.dispose()
    return key.key_id


@pytest.fixture
def spillway(sqlite_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    asyncio.run(fill(sqlite_url))
    monkeypatch.setenv("SPILLWAY_DATABASE__URL", sqlite_url)
    monkeypatch.setenv("SPILLWAY_PAYLOADS__KEY", KEY.hex())
    monkeypatch.chdir(tmp_path)

    def run(*arguments: str) -> Result:
        return CliRunner().invoke(app, [*arguments, "--data", str(tmp_path / "data")])

    return run


def test_a_payload_is_shown_decrypted_until_it_is_deleted(spillway, monkeypatch: pytest.MonkeyPatch) -> None:
    shown = json.loads(spillway("payloads", "show", "a").stdout)
    assert shown["request"]["messages"] == [{"role": "user", "content": "I am ann"}]
    monkeypatch.setenv("SPILLWAY_PAYLOADS__KEY", "00" * 32)
    wrong = spillway("payloads", "show", "a")
    assert (wrong.exit_code, "which is not in payloads.key" in wrong.stderr) == (1, True)
    assert spillway("payloads", "delete").exit_code == 2
    assert spillway("payloads", "delete", "--user", "ann", "--request", "a").exit_code == 2
    assert spillway("payloads", "delete", "--user", "ann").stdout == "deleted 1 payloads\n"
    assert spillway("payloads", "show", "a").exit_code == 1
    assert spillway("payloads", "delete", "--key", "the key").stdout == "deleted 1 payloads\n"


async def name_another_like(database_url: str) -> str:
    """Give a second key the first one's id as its name, as an older release let it have; returns that id."""
    engine = create_engine(database_url)
    (first,) = await list_keys(engine)
    second, _ = await create_key(engine, "second", SecretStr("p" * 64))
    async with engine.begin() as connection:
        await connection.execute(update(ApiKeyRow).where(ApiKeyRow.id == second.key_id).values(name=first.key_id))
    await engine.dispose()
    return first.key_id


def test_an_id_means_that_key_alone(spillway, sqlite_url: str, tmp_path: Path) -> None:
    key_id = asyncio.run(name_another_like(sqlite_url))
    wanted = ("--out", str(tmp_path / "set"), "--key", key_id, "--since", "2001-01-01", "--split", "1")
    assert "train.jsonl: 2 examples" in spillway("export", "finetune", *wanted).stdout
    assert spillway("payloads", "delete", "--key", key_id).stdout == "deleted 2 payloads\n"


def test_a_training_set_is_written(spillway, tmp_path: Path) -> None:
    wanted = ("--key", "the key", "--team", "default", "--model", "demo", "--since", "2001-01-01", "--split", "1")
    result = spillway("export", "finetune", "--out", str(tmp_path / "set"), *wanted)
    assert result.exit_code == 0, result.stderr
    assert "train.jsonl: 2 examples" in result.stdout
    assert "at least 10 examples" in result.stderr
    assert len((tmp_path / "set" / "train.jsonl").read_text().splitlines()) == 2
    again = spillway("export", "finetune", "--out", str(tmp_path / "set"))
    assert (again.exit_code, "already exists" in again.stderr) == (1, True)
    for wrong in (("--key", "nobody"), ("--split", "0.5"), ("--split", "x"), ("--format", "xml")):
        assert spillway("export", "finetune", "--out", str(tmp_path / "other"), *wrong).exit_code > 0
    assert not (tmp_path / "other").exists()
