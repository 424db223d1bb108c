"""What `spillway fleet` says where nothing is controlled, and of what is."""

import asyncio
import json
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

import migrations
from db.engine import create_engine
from db.tables import Decision
from fleet.machine import Machine, State
from fleet.machine_store import MachineStore
from spillway.cli import app

CONFIG = """
data_dir = "data"
[models.m]
[pools.{name}]
models = ["m"]
engine = {{ kind = "scripted" }}
"""
FLEET = 'fleet = { driver = { kind = "process" } }'


def spillway(*arguments: str) -> tuple[int, str]:
    done = CliRunner().invoke(app, ["fleet", *arguments], env={"COLUMNS": "80"})
    return done.exit_code, done.output


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


NO_FLEET = "no pool has a [pools.<name>.fleet] section: there is no fleet to control"


@pytest.mark.parametrize("command", ["status", "explain"])
def test_where_no_pool_has_a_fleet_each_command_says_so(command: str) -> None:
    assert spillway(command) == (1, f"error: {NO_FLEET}\n")


def test_where_no_pool_has_a_fleet_the_controller_logs_so_and_ends() -> None:
    code, said = spillway("run")
    [line] = map(json.loads, said.splitlines())
    assert (code, line["level"], line["process"], line["event"]) == (1, "error", "fleet", NO_FLEET)


def test_where_a_driver_has_no_key_the_controller_says_what_is_missing(
    folder: Path, nats_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = 'fleet = { driver = { kind = "runpod", gpu_types = ["NVIDIA L40S"], image = "worker:1" } }'
    (folder / "spillway.toml").write_text(CONFIG.format(name="spot") + driver)
    monkeypatch.setenv("SPILLWAY_NATS__URLS", f'["{nats_url}"]')
    monkeypatch.delenv("RUNPOD_API_KEY", raising=False)
    code, said = spillway("run")
    assert code == 1
    last = json.loads(said.splitlines()[-1])
    assert (last["level"], last["event"]) == (
        "error",
        "driver.api_key: required. Set it or the variable RUNPOD_API_KEY",
    )


def test_without_a_database_it_says_what_to_run(folder: Path) -> None:
    (folder / "spillway.toml").write_text(CONFIG.format(name="spot") + FLEET)
    code, said = spillway("status")
    assert code == 1
    assert "spillway db upgrade" in said


def test_status_and_explain_of_a_pool(folder: Path) -> None:
    (folder / "spillway.toml").write_text(CONFIG.format(name="a-pool-with-a-rather-long-name") + FLEET)
    (folder / "data").mkdir()
    url = f"sqlite:///{folder / 'data/spillway.db'}"
    migrations.upgrade(url)
    asyncio.run(_fill(url, "a-pool-with-a-rather-long-name"))
    code, said = spillway("status")
    assert code == 0
    for heading in ("driver", "bounds", "decided", "serving", "starting", "draining", "ended", "lost", "failed"):
        assert heading in said
    code, said = spillway("explain", "a-pool-with-a-rather-long-name")
    assert "1 worker: nothing waits" in said
    assert "machine m-1 at b is serving: first heartbeat received" in said
    assert spillway("explain", "other") == (
        1,
        "error: pools.other: no such pool; defined pools: a-pool-with-a-rather-long-name\n",
    )


async def _fill(url: str, pool: str) -> None:
    engine, now_ms = create_engine(url), round(time.time() * 1000)
    store = MachineStore(engine)
    await store.add_decisions([Decision(now_ms - 2, pool, 1, 0, 0, "nothing waits")])
    await store.add(
        Machine("m-1", pool, "b", State.SERVING, now_ms - 1, serving_unix_ms=now_ms, reason="first heartbeat received")
    )
    await engine.dispose()
