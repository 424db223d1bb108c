from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.acceptance.system import System


@pytest.fixture(scope="session")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    """One running Spillway with the demo model, shared by all tests: starting one takes seconds."""
    yield from run_system(tmp_path_factory.mktemp("demo") / "data", [])


@pytest.fixture(scope="session")
def scripted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    """One running Spillway with the scripted engine, shared by all tests."""
    yield from run_system(tmp_path_factory.mktemp("scripted") / "data", ["--model", "scripted"])


def run_system(data_dir: Path, arguments: list[str]) -> Iterator[System]:
    system = System(data_dir, arguments)
    system.start()
    try:
        yield system
    finally:
        system.kill_if_running()
