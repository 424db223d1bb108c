"""What the examples and the first tutorial run in: a copy of their folder, and a port of their own."""

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from pool_worker.settings import LocalEngineSettings
from spillway.config import DEMO_MODEL_PATH, load_config
from tests.acceptance.examples.terminal import Terminal
from tests.acceptance.system import System
from tests.compose.pages import Page
from tests.unit.deploy.description import ROOT


@dataclass
class Example:
    """A copy of an example's folder, its README, and the system that its commands start."""

    folder: Path
    page: Page
    variables: dict[str, str]
    system: System

    def terminal(self, name: str) -> Terminal:
        port, url = str(self.system.port), self.system.base_url
        ours = {"SPILLWAY_GATEWAY__PORT": port, "SPILLWAY_BASE_URL": url, **self.variables}
        return Terminal(self.folder, self.folder.parent / f"{name}.log", ours)


@pytest.fixture
def example(tmp_path: Path) -> Callable[[str], Example]:
    """Copy an example; the checkout's model is where the example expects it."""

    def copied(name: str) -> Example:
        folder = tmp_path / "examples" / name
        shutil.copytree(ROOT / "examples" / name, folder, ignore=shutil.ignore_patterns("data", "keys", "key"))
        (tmp_path / "models").mkdir()
        (tmp_path / "models" / DEMO_MODEL_PATH.name).symlink_to(DEMO_MODEL_PATH)
        return Example(folder, Page(folder / "README.md"), {}, System(folder / "data", []))

    return copied


def serve_by_a_script(config: Path, inter_token_s: float = 0.0) -> None:
    """Replace the demo model in a file, which takes seconds to load, by the scripted engine."""
    engine = load_config(config, env={}).pools["local"].engine
    assert isinstance(engine, LocalEngineSettings)
    assert (config.parent / engine.path).samefile(DEMO_MODEL_PATH)
    before, table, _ = config.read_text().partition("[pools.local.engine]")
    config.write_text(f'{before}{table}\nkind = "scripted"\ninter_token_s = {inter_token_s}\n')
