"""Checks of ``spillway up`` before it starts anything."""

import sys
from pathlib import Path

import pytest
import typer

from spillway.cli.up import check_local_engines, finding_options, next_commands
from spillway.config import default_config
from spillway.up import Running


@pytest.mark.parametrize(
    ("config", "data", "options"),
    [
        (None, None, ""),
        (Path("a.toml"), None, " --config a.toml"),
        (None, Path("/var/lib/spillway"), " --data /var/lib/spillway"),
        (Path("my files/a.toml"), Path("d"), " --config 'my files/a.toml' --data d"),
    ],
)
def test_the_printed_commands_find_the_running_system(config: Path | None, data: Path | None, options: str) -> None:
    running = Running("http://127.0.0.1:8000", "", "", "demo", Path("d"))
    printed = next_commands(running, finding_options({"--config": config, "--data": data}))
    commands = [line.partition("spillway ")[2] for line in printed.splitlines()[:3]]
    assert commands == [f"usage{options}", f"keys create NAME{options}", f"admin password{options}"]


def test_a_missing_torch_is_told(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(typer.Exit):
        check_local_engines(default_config(env={}))
    assert "pools.local: its engine needs torch: pip install 'spillway[worker]'" in capsys.readouterr().err
    check_local_engines(default_config(env={}, model="scripted"))
