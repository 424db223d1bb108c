"""The table of commands: what it says of them holds, and a process imports what its own command needs."""

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.core import TyperCommand
from typer.testing import CliRunner

from protocol.distribution import version
from spillway.cli import COMMANDS, Command, Group, app

# Runs a command, and prints which of the packages named it has imported.
IMPORTED_BY = """
import sys
from spillway.cli import app
looked_for = sys.argv.pop(1).split(",")
try:
    app(prog_name="spillway")
except SystemExit as ended:
    print("exit code", ended.code)
print("imported:", *(name for name in looked_for if name in sys.modules))
"""
SQL = "sqlalchemy,alembic,asyncpg,aiosqlite"
HEAVY = f"{SQL},torch,numpy,fastapi,nats,httpx,structlog"


def all_commands() -> Iterator[tuple[str, Command]]:
    for name, entry in COMMANDS.items():
        if isinstance(entry, Group):
            yield from ((f"{name} {below}", command) for below, command in entry.commands.items())
        else:
            yield name, entry


@pytest.mark.parametrize(
    ("name", "command"), list(all_commands()), ids=lambda given: given if isinstance(given, str) else ""
)
def test_each_command_of_the_table_is_there_and_says_the_same_of_itself(name: str, command: Command) -> None:
    loaded = command.load(name.rpartition(" ")[2])
    assert isinstance(loaded, TyperCommand)
    assert loaded.name == name.rpartition(" ")[2]
    assert loaded.help is not None
    assert " ".join(loaded.help.split("\n\n")[0].split()) == command.help


@pytest.mark.parametrize("groups", [(), ("keys",), ("fleet",)])
def test_help_names_every_command_in_the_tables_order(groups: tuple[str, ...]) -> None:
    table = COMMANDS
    for group in groups:
        entry = COMMANDS[group]
        assert isinstance(entry, Group)
        table = entry.commands
    shown = CliRunner().invoke(app, [*groups, "--help"], env={"COLUMNS": "200"}).output
    assert re.findall(r"^│ ([a-z][a-z-]*) ", shown, re.MULTILINE) == list(table)
    assert all(entry.help in shown for entry in table.values())


def test_a_wrong_name_is_answered_with_the_right_one() -> None:
    assert "Did you mean 'create'?" in CliRunner().invoke(app, ["keys", "creat"]).output


@pytest.mark.parametrize(
    ("typed", "offered"), [("spillway wor", "worker"), ("spillway keys ro", "rotate"), ("spillway up --mo", "--model")]
)
def test_a_shell_completes_groups_commands_and_options(typed: str, offered: str) -> None:
    env = {"_SPILLWAY_COMPLETE": "complete_zsh", "_TYPER_COMPLETE_ARGS": typed}
    assert f'"{offered}"' in CliRunner().invoke(app, [], prog_name="spillway", env=env).output


def run(folder: Path, looked_for: str, *arguments: str) -> str:
    root = Path(__file__).resolve().parents[3]
    command = [sys.executable, "-c", IMPORTED_BY, looked_for, *arguments]
    env = {"PYTHONPATH": str(root), "PATH": ""}
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=folder, env=env)
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


# Typer itself imports pydantic, once it has a command below the first to call.
@pytest.mark.parametrize(
    ("arguments", "looked_for"),
    [(("--help",), f"{HEAVY},pydantic"), (("keys", "--help"), HEAVY), (("fleet", "--help"), HEAVY)],
)
def test_help_of_groups_imports_no_command(arguments: tuple[str, ...], looked_for: str, tmp_path: Path) -> None:
    said = run(tmp_path, looked_for, *arguments)
    assert "exit code 0" in said
    assert said.endswith("imported:\n")


@pytest.mark.slow
def test_a_worker_that_has_read_its_configuration_has_no_sql(tmp_path: Path) -> None:
    options = ("--model", "m", "--tokenizer", "t.json", "--engine-url", "http://127.0.0.1:1", "--engine-kind", "vllm")
    said = run(tmp_path, f"{SQL},pool_worker.main", "worker", "--pool", "p", *options)
    assert "nats.urls: required" in said  # all else of it is valid
    assert "imported: pool_worker.main\n" in said


@pytest.mark.slow
def test_no_command_imports_torch_before_it_runs_an_engine() -> None:
    modules = ",".join(sorted({f"spillway.cli.{command.place.partition(':')[0]}" for _, command in all_commands()}))
    code = f"import sys, {modules}; print([m for m in ('torch', 'transformers') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_the_version() -> None:
    shown = CliRunner().invoke(app, ["--version"])
    assert (shown.exit_code, shown.output) == (0, f"spillway {version()}\n")


# Servers, and commands whose output is a file, a sentence about what was done, or JSON anyway.
WITHOUT_JSON = {
    "up", "init", "gateway", "worker", "ledger", "keys revoke", "batch download",
    "webhooks test", "webhooks delete", "admin password", "payloads show", "payloads delete", "export finetune",
    "db upgrade", "nats credentials", "nats machine", "fleet run",
}  # fmt: skip


def test_every_command_that_prints_data_has_json() -> None:
    has_json = {name: any("--json" in one.opts for one in command.load("").params) for name, command in all_commands()}
    assert {name for name, has in has_json.items() if not has} == WITHOUT_JSON
