"""Limits of open lines."""

from types import SimpleNamespace

import pytest

from gateway.batches import room
from gateway.batches.room import FIRST_LIMIT, HALVING_GAP_S, Window


def test_many_lines_with_one_reason_halve_the_window_once(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 100.0
    monkeypatch.setattr(room, "time", SimpleNamespace(monotonic=lambda: now_s))
    window = Window()
    for _ in range(10):
        window.shrink()
    assert window.limit == FIRST_LIMIT // 2
    now_s += HALVING_GAP_S
    window.shrink()
    assert window.limit == FIRST_LIMIT // 4
