"""Running systems that all files of this folder share, and that end with the last of them.

One process gets all these files (tests/conftest.py).
"""

from collections.abc import Iterator

import pytest

from tests.acceptance.system import System, run_system


@pytest.fixture(scope="package")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    """One running Spillway with the demo model, shared by all tests: starting one takes seconds."""
    yield from run_system(tmp_path_factory.mktemp("demo") / "data", [])


@pytest.fixture(scope="package")
def scripted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    """One running Spillway with the scripted engine, shared by all tests."""
    yield from run_system(tmp_path_factory.mktemp("scripted") / "data", ["--model", "scripted"])
