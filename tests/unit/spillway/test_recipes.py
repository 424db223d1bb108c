"""Every configuration of docs/reference/engines.md and docs/engines/ is read with the real settings."""

import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from spillway.config import ConfigError, config_without_file

DOCS = Path(__file__).resolve().parents[3] / "docs"
FILES = [DOCS / "reference" / "engines.md", *sorted((DOCS / "engines").glob("*.md"))]
RECIPES = [path for path in FILES[1:] if path.name != "README.md"]
BLOCK = re.compile(r"^```toml\n(.*?)^```", re.MULTILINE | re.DOTALL)
OTHERS_BLOCKS = re.compile(r"^```(\w*)$", re.MULTILINE)


def blocks() -> Iterator[Any]:
    for path in FILES:
        for number, found in enumerate(BLOCK.finditer(path.read_text()), 1):
            yield pytest.param(found[1], id=f"{path.relative_to(DOCS)} {number}")


def overlay(text: str) -> dict[str, Any]:
    """Return a block's settings over those that the text around it gives the same pool."""
    said = tomllib.loads(text)
    for name, pool in said.get("pools", {}).items():
        if "models" not in pool:  # a block about the pool's engine alone
            said.setdefault("models", {}).setdefault("m", {})
            pool["models"] = ["m"]
        if "kind" not in pool.get("engine", {}):  # lines to be added to an engine's
            pool["engine"] = {"kind": "scripted", **pool.get("engine", {})}
        assert pool["models"], name
    return said


@pytest.mark.parametrize("text", list(blocks()))
def test_a_configuration_can_be_used(text: str) -> None:
    said = overlay(text)
    config = config_without_file(said, env={})
    assert config.pools
    for name in config.pools:
        config_without_file({**said, "nats": {"urls": ["tls://queue:4222"]}}, env={}).worker_settings(name)


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.name)
def test_a_recipe_has_a_whole_configuration_and_the_index_says_what_was_tried(path: Path) -> None:
    text = path.read_text()
    first = BLOCK.search(text)
    assert first is not None
    said = tomllib.loads(first[1])
    assert said == overlay(first[1])
    assert said["models"]
    [row] = [line for line in (DOCS / "engines/README.md").read_text().splitlines() if f"]({path.name})" in line]
    assert re.search(r"\| [^|]*(replay|real)[^|]* \|$", row)


def test_no_block_is_left_unread() -> None:
    """One that is not called toml would not be looked at."""
    for path in FILES:
        names = set(OTHERS_BLOCKS.findall(path.read_text()))
        assert names <= {"", "toml", "sh", "dockerfile", "python", "json"}, path


KINDS = sorted({kind for path in FILES for kind in re.findall(r'^kind = "(\w+)"', path.read_text(), re.MULTILINE)})


@pytest.mark.parametrize("kind", KINDS)
def test_an_unknown_key_is_found_and_named(kind: str) -> None:
    engine = {"kind": kind, "url": "http://h", "tokenizer": "t", "model": "m", "colour": 1}
    with pytest.raises(ConfigError, match=r"pools\.p\.engine\.colour: unknown key; valid keys: "):
        config_without_file({"models": {"m": {}}, "pools": {"p": {"models": ["m"], "engine": engine}}}, env={})
