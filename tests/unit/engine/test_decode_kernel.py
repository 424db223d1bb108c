"""The attention kernel that is compiled at the start: where it cannot be, torch's own does, and the log says why."""

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from engine.decode_kernel import decode_kernel


@pytest.fixture(autouse=True)
def forgotten() -> Iterator[None]:
    """Nothing compiled before is remembered, nor anything of these tests after."""
    decode_kernel.cache_clear()
    yield
    decode_kernel.cache_clear()


def test_it_is_compiled_once_for_a_head_dimension_and_leaves_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    kernel = decode_kernel(32, torch.float32)
    assert kernel is not None
    assert decode_kernel(32, torch.float32) is kernel
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("head_dim", "dtype"), [(40, torch.float32), (64, torch.bfloat16)])
def test_other_heads_are_left_to_torch(head_dim: int, dtype: torch.dtype) -> None:
    assert decode_kernel(head_dim, dtype) is None


def test_without_a_compiler_torch_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with caplog.at_level(logging.INFO):
        assert decode_kernel(64, torch.float32) is None
    assert "no C compiler (gcc) is installed" in caplog.text


def test_a_compiler_that_fails_is_quoted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    compiler = tmp_path / "gcc"
    compiler.write_text("#!/bin/sh\necho 'float.h: no such file' >&2\nexit 1\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    assert decode_kernel(64, torch.float32) is None
    assert "slower: float.h: no such file" in caplog.text
