"""How each agent is installed, told where Spillway is, and given a task without anybody to ask."""

import json
import os
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.player.engine import Turn

BIN = Path(__file__).with_name("node_modules") / ".bin"
TASK_LIMIT_S = 300.0  # of one agent, on a busy machine
NOWHERE = "http://127.0.0.1:9"  # what agents tell their makers goes there

Calls = list[tuple[str, Mapping[str, Any]]]


@dataclass(frozen=True)
class Place:
    """Where an agent works, and whom it asks."""

    home: Path
    folder: Path
    url: str  # Spillway's, without a path
    api_key: str
    model: str


@dataclass(frozen=True)
class Agent:
    """One agent."""

    name: str
    command: Callable[[Place], list[str]]  # the prompt follows
    setup: Callable[[Place], Mapping[str, str]]  # writes its settings; returns its environment
    read: Callable[[Path], Turn]  # the turn that reads a file
    edit: Callable[[Path, str, str], Turn]  # replaces a text in it
    bash: Callable[[str], Turn]  # runs a command

    def run(self, place: Place, prompt: str) -> subprocess.CompletedProcess[str]:
        """Give it a task, and wait until it says that it is done."""
        environment = {
            "PATH": os.environ["PATH"],
            "HOME": str(place.home),
            "LANG": "C.UTF-8",
            "TERM": "dumb",
            "HTTP_PROXY": NOWHERE,
            "HTTPS_PROXY": NOWHERE,
            "NO_PROXY": "127.0.0.1",
            **self.setup(place),
        }
        return subprocess.run(
            [*self.command(place), prompt],
            check=False,  # the test says more
            cwd=place.folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=TASK_LIMIT_S,
        )


def _call(name: str, **arguments: Any) -> Turn:
    return {"calls": [[name, arguments]]}


# --- opencode: chat completions ---------------------------------------------------------------------------------------


def _opencode_setup(place: Place) -> dict[str, str]:
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "options": {"baseURL": f"{place.url}/v1", "apiKey": place.api_key},
        "models": {place.model: {"name": place.model}},
    }
    config = {
        "model": f"spillway/{place.model}",
        "autoupdate": False,
        "share": "disabled",
        "provider": {"spillway": provider},
    }
    (place.folder / "opencode.json").write_text(json.dumps(config))
    return {"OPENCODE_DISABLE_MODELS_FETCH": "1"}


OPENCODE = Agent(
    "opencode",
    lambda _: [str(BIN / "opencode"), "run"],
    _opencode_setup,
    lambda path: _call("read", filePath=str(path)),
    lambda path, old, new: _call("edit", filePath=str(path), oldString=old, newString=new),
    lambda command: _call("bash", command=command, description="Run it"),
)


# --- Codex: responses -------------------------------------------------------------------------------------------------

CODEX_CONFIG = """
model = "{model}"
model_provider = "spillway"

[model_providers.spillway]
name = "Spillway"
base_url = "{url}/v1"
env_key = "SPILLWAY_API_KEY"
wire_api = "responses"
"""


def _codex_setup(place: Place) -> dict[str, str]:
    (place.home / ".codex").mkdir()
    (place.home / ".codex" / "config.toml").write_text(CODEX_CONFIG.format(model=place.model, url=place.url))
    return {"SPILLWAY_API_KEY": place.api_key}


def _patch(path: Path, old: str, new: str) -> Turn:
    [line] = [line for line in path.read_text().splitlines() if old in line]
    patch = f"*** Begin Patch\n*** Update File: {path.name}\n@@\n-{line}\n+{line.replace(old, new)}\n*** End Patch\n"
    return _call("exec_command", cmd=f"apply_patch <<'EOP'\n{patch}EOP")


CODEX = Agent(
    "codex",
    lambda _: [str(BIN / "codex"), "exec", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox"],
    _codex_setup,
    lambda path: _call("exec_command", cmd=f"cat {path}"),
    _patch,
    lambda command: _call("exec_command", cmd=command),
)


# --- Claude Code: messages --------------------------------------------------------------------------------------------

CLAUDE_CODE = Agent(
    "claude-code",
    lambda _: [str(BIN / "claude"), "--allowedTools=Read,Edit,Bash", "--print"],
    lambda place: {
        "ANTHROPIC_BASE_URL": place.url,
        "ANTHROPIC_AUTH_TOKEN": place.api_key,
        "ANTHROPIC_MODEL": place.model,
        "ANTHROPIC_SMALL_FAST_MODEL": place.model,
        "DISABLE_TELEMETRY": "1",
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
    },
    lambda path: _call("Read", file_path=str(path)),
    lambda path, old, new: _call("Edit", file_path=str(path), old_string=old, new_string=new),
    lambda command: _call("Bash", command=command, description="Run it"),
)

AGENTS = {agent.name: agent for agent in (OPENCODE,)}
