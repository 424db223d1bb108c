"""``spillway webhooks``."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from spillway.cli import app


@pytest.fixture
def spillway(sqlite_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("SPILLWAY_DATABASE__URL", sqlite_url)
    monkeypatch.chdir(tmp_path)

    def run(*arguments: str) -> Result:
        return CliRunner().invoke(app, ["webhooks", *arguments, "--data", str(tmp_path / "data")])

    return run


def test_an_endpoint_lives_by_the_command_line(spillway) -> None:
    made = json.loads(spillway("create", "https://example.com/h", "--event", "batch.failed", "--json").stdout)
    assert made["secret"].startswith("whsec_")
    identity = made["id"]
    assert [one["id"] for one in json.loads(spillway("list", "--json").stdout)] == [identity]
    assert "batch.failed" in spillway("list").stdout
    rotated = spillway("rotate", identity, "--grace-s", "60").stdout
    assert rotated.startswith("whsec_")
    assert made["secret"] not in rotated
    assert "evt_test_" in spillway("test", identity).stdout
    (delivery,) = json.loads(spillway("deliveries", identity, "--json").stdout)
    assert (delivery["event_type"], delivery["outcome"]) == ("batch.failed", "waiting")
    assert "waiting" in spillway("deliveries", identity).stdout
    assert json.loads(spillway("update", identity, "--disable", "--json").stdout)["enabled"] is False
    assert "disabled by an operator" in spillway("show", identity).stdout
    assert spillway("delete", identity).stdout.startswith(f"deleted {identity}")
    gone = spillway("show", identity)
    assert (gone.exit_code, "no webhook endpoint has the id" in gone.stderr) == (1, True)
    everything = json.loads(spillway("create", "https://example.com/h", "--json").stdout)
    assert "team.budget.threshold" in everything["event_types"]
    refused = spillway("create", "http://example.com/")
    assert (refused.exit_code, "must use https" in refused.stderr) == (1, True)
