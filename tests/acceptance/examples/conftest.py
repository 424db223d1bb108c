"""What the examples and the first tutorial run in: a copy of their folder, and a port of their own."""

import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from benchmarks.ports import free_port
from spillway.config import DEMO_MODEL_PATH
from tests.acceptance.examples.terminal import Terminal
from tests.compose.pages import Page
from tests.unit.deploy.description import ROOT


@dataclass
class Example:
    """A copy of an example's folder, and its README."""

    folder: Path
    page: Page
    variables: dict[str, str]
    port: int = field(default_factory=free_port)

    @property
    def base_url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def terminal(self, name: str) -> Terminal:
        ours = {"SPILLWAY_GATEWAY__PORT": str(self.port), "SPILLWAY_BASE_URL": self.base_url, **self.variables}
        return Terminal(self.folder, self.folder.parent / f"{name}.log", ours)


@pytest.fixture
def example(tmp_path: Path) -> Callable[[str], Example]:
    """Copy an example; the checkout's model is where the example expects it."""

    def copied(name: str) -> Example:
        folder = tmp_path / "examples" / name
        shutil.copytree(ROOT / "examples" / name, folder, ignore=shutil.ignore_patterns("data", "keys", "key"))
        (tmp_path / "models").mkdir()
        (tmp_path / "models" / DEMO_MODEL_PATH.name).symlink_to(DEMO_MODEL_PATH)
        return Example(folder, Page(folder / "README.md"), {})

    return copied
