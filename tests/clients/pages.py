"""The examples of docs/clients, with this system's address, key and model in place of those that stand there."""

import re
from pathlib import Path

from tests.player.system import PlayedSystem

FOLDER = Path(__file__).parents[2] / "docs" / "clients"
_BLOCK = re.compile(r"```(\w+)\n(.*?)```", re.DOTALL)


def blocks(page: str) -> dict[str, str]:
    """The page's code, by language: what several blocks say is one program."""
    found: dict[str, str] = {}
    for language, text in _BLOCK.findall((FOLDER / page).read_text()):
        found[language] = found.get(language, "") + text
    return found


def examples(page: str, spillway: PlayedSystem) -> dict[str, str]:
    """The page's blocks as they ask this system."""
    ours = {"http://127.0.0.1:8000": spillway.url, "sk-sw-…": spillway.api_key, "spillway-demo": spillway.model}
    changed = blocks(page)
    for theirs, value in ours.items():
        assert any(theirs in text for text in changed.values()), f"{page} does not say {theirs}"
        changed = {language: text.replace(theirs, value) for language, text in changed.items()}
    return changed
