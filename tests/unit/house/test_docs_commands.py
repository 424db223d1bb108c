"""Commands of the docs are ones that exist."""

from pathlib import Path

import pytest

from tests.unit.deploy.description import options_of
from tests.unit.deploy.test_deploy_docs import commands, inside
from tests.unit.house.test_tidy import DOCS, ROOT


def spillway_commands(page: Path) -> list[list[str]]:
    """The arguments of each ``spillway`` in a page's shell blocks: one list for each side of an ``&&``."""
    found: list[list[str]] = []
    for words in map(inside, commands(page)):
        rest = [*words, "&&"]
        while rest:
            one, rest = rest[: rest.index("&&")], rest[rest.index("&&") + 1 :]
            one = one[: next((at for at, word in enumerate(one) if word.startswith((">", "|", "&"))), None)]
            if one and one[0] == "spillway":
                found.append(one[1:])
    return found


# Shells run whole blocks of tutorials: tests/acceptance/examples.
PAGES = [page for page in DOCS if page.parent.name != "tutorials"]


@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_options_of_commands_are_understood(page: Path) -> None:
    for words in spillway_commands(page):
        options_of(words)
