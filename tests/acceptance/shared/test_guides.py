"""The `spillway` commands of guides, reference and explanation, run as they stand, in the order of their page."""

import re
from pathlib import Path

import pytest

from tests.acceptance.system import System
from tests.unit.house.test_docs_commands import spillway_commands
from tests.unit.house.test_tidy import ROOT

PAGES = [
    page
    for folder in ("how-to", "reference", "explanation", "engines")
    for page in sorted((ROOT / "docs" / folder).glob("*.md"))
    if spillway_commands(page)
]
# The beginnings of commands that other tests run, and where.
ELSEWHERE = {
    "batch": "integration/gateway/batches/test_batch_command.py",
    "bench pool": "integration/test_bench_pool_command.py",
    "config": "unit/spillway/test_first_commands.py",
    "export": "unit/spillway/test_payload_commands.py",
    "fleet": "fleet/test_commands.py",
    "init": "unit/spillway/test_first_commands.py",
    "keys create prometheus": "compose",
    "nats": "integration/credentials",
    "payloads": "unit/spillway/test_payload_commands.py",
    "plan": "fleet/test_simulation.py",
    "up": "acceptance",
    "worker": "integration/test_worker_command.py",
}
NEEDED = {  # what a page takes for granted
    "engines": ("teams create search",),
    "hosted.md": ("teams create search", "keys create nightly --team search", "keys create secret --team search"),
    "limits.md": ("teams create research",),
    "security.md": ("teams create legal",),
    "webhooks.md": ("teams create search",),
}
NAMES = {"search", "research", "legal", "nightly", "secret", "app"}  # a page's own, in the database that all share


def is_run_here(words: list[str]) -> bool:
    line = " ".join(words)
    return not any(line == begun or line.startswith(f"{begun} ") for begun in ELSEWHERE)


def test_what_is_run_elsewhere_has_a_test() -> None:
    used = {" ".join(words) for page in PAGES for words in spillway_commands(page)}
    for begun, where in ELSEWHERE.items():
        assert any(line == begun or line.startswith(f"{begun} ") for line in used), begun
        assert (ROOT / "tests" / where).exists(), where


@pytest.mark.parametrize("page", PAGES, ids=lambda page: f"{page.parent.name}/{page.name}")
def test_the_commands_of_a_page_work(system: System, page: Path) -> None:
    endpoint_id = ""

    def filled(word: str) -> str:
        if word in NAMES:
            return f"{word}-of-{page.stem}"
        return {"llama-8b": "scripted", "wh_…": endpoint_id}.get(word, word.replace("…", "x"))

    needed = NEEDED.get(page.name, NEEDED.get(page.parent.name, ()))
    for words in [*(line.split() for line in needed), *filter(is_run_here, spillway_commands(page))]:
        system.command(*map(filled, words))
        if words[:2] == ["webhooks", "create"]:
            [endpoint_id] = re.findall(r"wh_\w+", system.command("webhooks", "list"))[-1:]
