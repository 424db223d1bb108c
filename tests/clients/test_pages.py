"""Each example of docs/clients runs; those of coding agents in tests/agents."""

import contextlib
import gc
import io
import subprocess

import pytest

from tests.agents.programs import AGENTS
from tests.clients.asked import READ, READING
from tests.clients.pages import FOLDER, blocks, examples
from tests.clients.test_node import FOLDER as NODE_FOLDER
from tests.clients.test_node import NODE, needs_packages
from tests.player.engine import NO_PLAY
from tests.player.system import PlayedSystem
from tests.waiting import HANGS_S

PAGES = sorted(path.name for path in FOLDER.glob("*.md") if path.name != "README.md")
PYTHON = [page for page in PAGES if "python" in blocks(page)]
JAVASCRIPT = [page for page in PAGES if "js" in blocks(page)]
QUESTION_OF_STRUCTURE = "The Elbe stands at 277 cm."


def test_every_page_is_listed_and_run() -> None:
    index = (FOLDER / "README.md").read_text()
    assert [page for page in PAGES if f"({page})" not in index] == []
    agents = {f"{name}.md" for name in AGENTS}
    assert {*PYTHON, *JAVASCRIPT, *agents} == set(PAGES)


@pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning")  # as short programs do, they leave their clients open
@pytest.mark.parametrize("page", PYTHON)
def test_python(spillway: PlayedSystem, page: str) -> None:
    code = examples(page, spillway)["python"]
    structured = QUESTION_OF_STRUCTURE in code
    answers = 2 if "batches" in code else 1
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(code.replace(QUESTION_OF_STRUCTURE, spillway.play(READ)), {"__name__": page})
    gc.collect()  # here and not in another test
    assert printed.getvalue().strip() == (str(READING) if structured else NO_PLAY * answers)


@needs_packages
@pytest.mark.parametrize("page", JAVASCRIPT)
def test_node(spillway: PlayedSystem, page: str) -> None:
    code = examples(page, spillway)["js"]
    done = subprocess.run(
        [str(NODE), "--input-type=module", "--eval", code],
        cwd=NODE_FOLDER,
        capture_output=True,
        text=True,
        check=False,
        timeout=HANGS_S,
    )
    assert (done.returncode, done.stdout) == (0, NO_PLAY), done.stderr
