"""``docs/tutorials/first-hour.md``, every command in its order; and how ``examples/README.md`` begins.

The scripted engine takes the place of the demo model, whose answer ``tests/unit/models/test_demo_model.py`` checks.
"""

import json
import re
from pathlib import Path

from tests.acceptance.examples.conftest import serve_by_a_script
from tests.acceptance.examples.terminal import STARTED, Terminal
from tests.acceptance.system import System
from tests.compose.pages import Page
from tests.unit.deploy.description import ROOT

INDEX = Page(ROOT / "examples/README.md")
PAGE = Page(ROOT / "docs/tutorials/first-hour.md")
INSTALL = "scripts/setup.sh run "  # `make test` has installed the same and more
ANSWER = re.compile(r'"content":"[^"]*"')
SLOW_S = 0.01  # per token: the long answer is still running when its worker is killed
IN_ORDER = [
    ("Start", 0),
    ("Start", 1),
    ("A team's first answer", 0),
    ("A budget that refuses", 0),
    ("A budget that refuses", 1),
    ("A killed worker", 0),
    ("The bill", 0),
]


def test_the_first_hour(tmp_path: Path) -> None:
    system = System(tmp_path / "first-hour" / "data", [])
    ours = {INSTALL: "true ", "127.0.0.1:8000": f"127.0.0.1:{system.port}"}
    variables = {"HOME": str(tmp_path), "SPILLWAY_GATEWAY__PORT": str(system.port)}
    blocks = [PAGE.script(heading, number, ours) for heading, number in IN_ORDER]
    first = Terminal(ROOT, tmp_path / "first.log", variables)
    second = Terminal(ROOT, tmp_path / "second.log", variables)
    installing, start, starting = blocks[0].partition("spillway up")
    with first, second:
        first.run(installing)
        serve_by_a_script(system.data_dir.with_name("spillway.toml"), SLOW_S)
        first.type(start + starting)
        first.wait_for(STARTED)
        status, answer, refusal, _, rescued, bill = [second.run(block) for block in blocks[1:]]
        assert "serving" in status
        assert "data: [DONE]" in answer
        error = json.loads(refusal[refusal.index('{"error"') :])["error"]
        assert error["code"] == "insufficient_quota"
        assert error["message"].startswith("Not enough of the team's budget is left: limit 0.0001 USD, used 0.0000")
        assert rescued.rstrip().endswith("data: [DONE]")
        assert "search" in bill
        system.wait_for_requests(2)
        [row] = system.usage("team")
        assert (row["team_name"], row["requests"], row["failed"], row["retried"]) == ("search", 2, 0, 1)
        assert row["completion_tokens"] > 600
        assert shown_but_not_printed(first.output() + second.output()) == []
        first.press_ctrl_c()


def shown_but_not_printed(printed: str) -> list[str]:
    """Return the page's lines of output that were not printed; numbers and answers may differ, ``…`` is any text."""
    lines = [plain(line) for line in printed.splitlines()]
    text = "\n".join(block for heading in PAGE.parts for block in PAGE.blocks(heading, ""))
    shown = ANSWER.sub('"content":"…"', text).splitlines()
    patterns = {line: re.compile(".*".join(map(re.escape, plain(line).split("…")))) for line in shown}
    return [line for line, pattern in patterns.items() if not any(map(pattern.search, lines))]


def plain(line: str) -> str:
    return re.sub(r"\d+", "0", " ".join(line.split()))


def test_every_command_is_run() -> None:
    assert [(heading, number) for _, heading, number in PAGE.scripts()] == IN_ORDER


def test_the_index_leads_to_each_example(tmp_path: Path) -> None:
    with Terminal(ROOT, tmp_path / "terminal.log", {}) as terminal:
        printed = terminal.run(INDEX.script("Examples", 0, {INSTALL: "true "}) + "pwd\ncommand -v spillway\n")
    assert printed.splitlines() == [str(ROOT / "examples/five-teams"), str(ROOT / ".venv/bin/spillway")]
    linked = set(re.findall(r"\]\(([\w-]+)/README\.md\)", INDEX.parts["Examples"]))
    assert linked == {path.parent.name for path in ROOT.glob("examples/*/spillway.toml")}
