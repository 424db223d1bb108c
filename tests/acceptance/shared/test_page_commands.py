"""The `spillway` commands of docs/deploy/, run as they stand there, against a running system."""

import re
from pathlib import Path

import pytest

from tests.acceptance.system import System
from tests.unit.deploy.test_deploy_docs import PAGES, commands, inside, spoken

# Those that start something, or are for files or a fleet: other tests run them (test_up, test_restore,
# tests/unit/deploy, tests/fleet).
ELSEWHERE = {"up", "config", "worker", "gateway", "ledger", "nats", "fleet"}
RUN = sorted(
    {
        tuple(words[1:])
        for page in PAGES
        for words in [*map(inside, commands(page)), *spoken(page)]
        if words[0] == "spillway" and words[1] not in ELSEWHERE
    }
)


def test_there_are_such_commands() -> None:
    assert {words[0] for words in RUN} >= {"admin", "db", "dead-letters", "keys", "limits", "parked", "usage"}


@pytest.mark.parametrize("words", RUN, ids=" ".join)
def test_a_command_of_the_pages_does_what_it_says(system: System, words: tuple[str, ...], tmp_path: Path) -> None:
    words = tuple(str(tmp_path / "copy") if word == "FOLDER" else word for word in words)
    if "NAME" in words:
        name = re.sub(r"\W+", "-", " ".join(words))
        system.command("keys", "create", name)
        words = tuple(name if word == "NAME" else word for word in words)
    system.command(*words)
