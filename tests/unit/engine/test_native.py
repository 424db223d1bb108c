"""C files that are compiled at the start: where they cannot be, torch's own kernels do, and the log says why."""

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from engine.native import compiled, compiling


@pytest.fixture(autouse=True)
def forgotten() -> Iterator[None]:
    """Nothing compiled before is remembered, nor anything of these tests after."""
    compiling.cache_clear()
    yield
    compiling.cache_clear()


def test_a_file_is_compiled_once_for_its_definitions_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    library = compiled("attention.c", "HEAD_DIM=32")
    assert library is not None
    assert compiled("attention.c", "HEAD_DIM=32") is library
    assert compiled("attention.c", "HEAD_DIM=64") is not library
    assert list(tmp_path.iterdir()) == []


def test_without_a_compiler_there_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with caplog.at_level(logging.INFO):
        assert compiled("panels.c") is None
    assert "no C compiler (gcc) is installed; without panels.c the engine will be slower" in caplog.text


def test_a_compiler_that_fails_is_quoted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    compiler = tmp_path / "gcc"
    compiler.write_text("#!/bin/sh\necho 'stdint.h: no such file' >&2\nexit 1\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    assert compiled("panels.c") is None
    assert "without panels.c the engine will be slower: stdint.h: no such file" in caplog.text
