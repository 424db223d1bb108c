"""C files compiled at the start: if that fails, torch's kernels are used, and the log says why."""

import logging
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

import tests
from engine.cpu import native
from engine.cpu.native import compiled, compiling


@pytest.fixture(autouse=True)
def forgotten() -> Iterator[None]:
    """Clear the cache of compiled libraries before and after the test."""
    compiling.cache_clear()
    yield
    compiling.cache_clear()


def test_a_file_is_compiled_once_for_its_definitions_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    library = compiled("attention.c", "HEAD_DIM=64")
    assert library is not None
    assert compiled("attention.c", "HEAD_DIM=64") is library
    assert compiled("attention.c", "HEAD_DIM=128") is not library
    assert list(tmp_path.iterdir()) == []


def test_without_a_compiler_there_is_no_library(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with caplog.at_level(logging.INFO):
        assert compiled("panels.c") is None
    assert "no C compiler (gcc) found; running without panels.c, which is slower" in caplog.text


def test_a_compiler_that_fails_is_quoted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    compiler = tmp_path / "gcc"
    compiler.write_text("#!/bin/sh\necho 'stdint.h: no such file' >&2\nexit 1\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    assert compiled("panels.c") is None
    assert "cannot compile panels.c; running without, slower: stdint.h: no such file" in caplog.text


def test_test_processes_share_compiled_libraries(tmp_path: Path) -> None:
    kept, real = tmp_path / "kept", tmp_path / "real"
    kept.mkdir()
    real.mkdir()
    compiler = real / "gcc"
    compiler.write_text(f'#!/bin/sh\necho "$1" >>{tmp_path}/calls\necho "made with $1" >{tmp_path}/library.so\n')
    compiler.chmod(0o755)
    ours = Path(tests.__file__).with_name("compiler")
    environment = {"PATH": f"{ours}:{real}:/usr/bin:/bin", "TESTS_COMPILED": str(kept)}
    library, source = tmp_path / "library.so", Path(native.__file__).with_name("panels.c")
    for definition in ("-DA=1", "-DA=1", "-DA=2"):
        library.unlink(missing_ok=True)
        subprocess.run([ours / "gcc", definition, source, "-o", library], check=True, env=environment)
        assert library.read_text() == f"made with {definition}\n"
    assert (tmp_path / "calls").read_text().split() == ["-DA=1", "-DA=2"]
