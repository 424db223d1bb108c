"""Checks of ``spillway up`` before it starts anything."""

import sys

import pytest
import typer

from spillway.cli.up import check_local_engines
from spillway.config import default_config


def test_a_missing_torch_is_told(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(typer.Exit):
        check_local_engines(default_config(env={}))
    assert "pools.local: its engine needs torch: pip install 'spillway[worker]'" in capsys.readouterr().err
    check_local_engines(default_config(env={}, model="scripted"))
