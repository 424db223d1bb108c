"""Each coding agent does a whole task while the workers that write its model's tool calls are killed."""

import os
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.agents.killer import Killer
from tests.agents.programs import AGENTS
from tests.agents.template_rules import RULES
from tests.player.system import PlayedSystem, run_played

KILLS = int(os.environ.get("AGENT_KILLS", "2"))  # of each answer that calls a tool
SEED = int(os.environ.get("AGENT_SEED", "1"))
INTER_TOKEN_S = 0.01  # a call takes more than a second to write
BROKEN = '''"""Greets whoever runs it."""

GREETING = "helo"

if __name__ == "__main__":
    print(GREETING, "from", __file__.rpartition("/")[2])
'''
CHOSEN = os.environ.get("AGENT_RULES", "no rule,system first,alternating,tools unknown").split(",")


@pytest.fixture(scope="module", params=CHOSEN)
def system(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[PlayedSystem]:
    with run_played(
        tmp_path_factory.mktemp("agents") / "run",
        workers=4,
        inter_token_s=INTER_TOKEN_S,
        with_vectors=False,
        template=RULES[request.param],
    ) as played:
        yield played


@pytest.mark.parametrize("name", AGENTS)
def test_a_task_ends_right_while_workers_are_killed(system: PlayedSystem, tmp_path: Path, name: str) -> None:
    agent = AGENTS[name]
    home, folder = tmp_path / "home", tmp_path / "work"
    home.mkdir()
    folder.mkdir()
    program = folder / "greeting.py"
    program.write_text(BROKEN)
    play = system.play(
        agent.read(program),
        {**agent.edit(program, '"helo"', '"hello"'), "expect": "helo"},
        {**agent.bash("python3 greeting.py > out.txt; cat out.txt"), "say": "Now I run it."},
        {"expect": "hello from greeting.py", "say": "Mended: it prints hello from greeting.py."},
    )
    killer = Killer(system.system, random.Random(f"{SEED} {name}"), KILLS)
    system.run(killer.start())

    done = agent.run(system, home, folder, f"Mend the greeting, run the program, and say what it prints. {play}")
    system.run(killer.stop())

    seen = f"{done.stdout}\n{done.stderr}\n" + "\n".join(system.system.log_lines("warning"))
    assert done.returncode == 0, seen
    assert "Mended: it prints hello from greeting.py." in done.stdout, seen
    assert program.read_text() == BROKEN.replace("helo", "hello"), seen
    assert (folder / "out.txt").read_text() == "hello from greeting.py\n", seen
    # Three answers called a tool, each was torn apart as often as asked for, and the agent never had to ask again.
    assert len(killer.calling) == 3, seen
    assert [len(killer.strikes[request]) for request in killer.calling] == [KILLS] * 3, seen
    assert [killer.moves(request) for request in killer.calling] == [KILLS] * 3, seen
