from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.acceptance.system import System


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    """One running Spillway with the demo model, shared by a module's tests."""
    yield from run_system(tmp_path_factory.mktemp("demo") / "data", [])


@pytest.fixture(scope="module")
def scripted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    """One running Spillway with the scripted engine, shared by a module's tests."""
    yield from run_system(tmp_path_factory.mktemp("scripted") / "data", ["--model", "scripted"])


def run_system(data_dir: Path, arguments: list[str]) -> Iterator[System]:
    system = System(data_dir, arguments)
    system.start()
    try:
        yield system
    finally:
        system.kill_if_running()
