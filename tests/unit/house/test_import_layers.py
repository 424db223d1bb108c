"""The house's import rules (docs/ARCHITECTURE.md): rooms on floors, no circles, and a gateway that needs no torch."""

import ast
import re
import subprocess
import sys
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]

# room → the rooms of ours that it may import, besides itself. Those that come later may import only what came before.
ALLOWED = {
    "protocol": set[str](),
    "engine": {"protocol"},
    "db": {"protocol"},
    "migrations": {"db"},
    "ledger": {"db", "protocol"},
    "fleet": {"db", "protocol"},
    "gateway": {"db", "ledger", "protocol"},
    "console": {"db", "gateway", "ledger", "protocol"},
    "pool_worker": {"engine", "protocol"},
}
ALLOWED["spillway"] = set(ALLOWED)

# The parts of the gateway: each may import only those before it.
GATEWAY = [
    "errors", "error_codes", "tokenizing", "settings", "limits", "request", "admission", "dispatch", "core", "api",
    "telemetry", "payloads", "http", "endpoints", "idempotency", "responses", "batches", "documentation", "mount",
    "app", "main",
]  # fmt: skip

Modules = dict[str, Path]  # dotted name → file


def test_the_tables_of_the_architecture_page_are_these() -> None:
    roots, _, gateway = (ROOT / "docs/ARCHITECTURE.md").read_text().partition("## The modules")[2].partition("| part |")
    rows = dict(re.findall(r"^\| `(\w+)/` .*\| (.+?) \|$", roots, re.MULTILINE))
    assert rows.keys() >= ALLOWED.keys()
    for name in ALLOWED.keys() - {"engine", "spillway"}:  # a single module of protocol; all
        assert set(re.findall(r"`(\w+)`", rows[name])) == ALLOWED[name], name
    first_columns = "".join(re.findall(r"^\| (`.+?`) \|", gateway, re.MULTILINE))
    parts = [part.removesuffix("/").removesuffix(".py") for part in re.findall(r"`([\w/.]+)`", first_columns)]
    assert parts == GATEWAY


def modules(*rooms: str) -> Modules:
    """Every module of these rooms; a package is called by its own name."""
    files = [path for room in rooms for path in (ROOT / room).rglob("*.py")]
    return {".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path for path in files}


def imported(text: str, known: Modules, where: str) -> set[str]:
    """The modules among ``known`` that a source imports, at run time or for its types alone."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{where}: relative import"
            module = node.module or ""
            found.update(
                f"{module}.{alias.name}" if f"{module}.{alias.name}" in known else module for alias in node.names
            )
    return {module for module in found if module in known}


@cache
def graph() -> dict[str, set[str]]:
    known = modules(*ALLOWED)
    return {name: imported(path.read_text(), known, name) - {name} for name, path in known.items()}


def room_of(module: str) -> str:
    return module.split(".", maxsplit=1)[0]


def folder_of(module: str) -> str:
    """A folder of a room, or one of the modules beside them."""
    return ".".join(module.split(".")[:2])


def circle(edges: dict[str, set[str]]) -> list[str]:
    """One circle; empty if there is none."""
    try:
        TopologicalSorter(edges).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def test_rooms_import_only_what_they_may() -> None:
    broken = [
        f"{module} imports {other}"
        for module, others in graph().items()
        for other in others
        if room_of(other) not in {room_of(module), *ALLOWED[room_of(module)]}
    ]
    assert broken == []


def test_no_rule_is_wider_than_it_must_be() -> None:
    used: dict[str, set[str]] = {room: set() for room in ALLOWED}
    for module, others in graph().items():
        used[room_of(module)] |= {room_of(other) for other in others} - {room_of(module)}
    assert {room: used[room] for room in ALLOWED if room != "spillway"} == {
        room: allowed for room, allowed in ALLOWED.items() if room != "spillway"
    }


def test_every_room_has_a_rule() -> None:
    rooms = {path.parent.name for path in ROOT.glob("*/__init__.py")} - {"benchmarks", "tests"}
    assert rooms == set(ALLOWED)


def test_the_rules_have_no_circle() -> None:
    assert circle(ALLOWED) == []


def test_no_circle_between_files() -> None:
    assert circle(graph()) == []


def test_no_circle_between_folders() -> None:
    folders: dict[str, set[str]] = {}
    for module, others in graph().items():
        mine = {folder_of(other) for other in others if room_of(other) == room_of(module)}
        folders.setdefault(folder_of(module), set()).update(mine - {folder_of(module)})
    assert len(folders) > 100
    assert circle(folders) == []


def test_a_part_of_the_gateway_imports_only_what_stands_above_it() -> None:
    parts = {module: GATEWAY.index(module.split(".")[1]) for module in modules("gateway") if "." in module}
    assert set(parts.values()) == set(range(len(GATEWAY)))
    broken = [
        f"{module} imports {other}"
        for module, part in parts.items()
        for other in graph()[module]
        if parts.get(other, part) > part
    ]
    assert broken == []


def test_a_breach_would_be_seen() -> None:
    known = modules("gateway", "ledger")
    text = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from gateway.dispatch import dispatcher\n"
    assert imported(text, known, "test") == {"gateway.dispatch.dispatcher"}
    assert circle({"a": {"b"}, "b": {"c"}, "c": {"a"}}) != []


TORCH, HTTP = {"torch", "transformers"}, {"fastapi", "starlette", "uvicorn"}


@cache
def loaded_by(*modules: str) -> list[set[str]]:
    """Return what one process has loaded of torch and of HTTP after it has imported each of these modules."""
    code = "".join(f"import sys, {module}; print(*sys.modules)\n" for module in modules)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    return [set(line.split()) & (TORCH | HTTP) for line in done.stdout.splitlines()]


def gateway_loads() -> list[set[str]]:
    return loaded_by("gateway.core", "gateway.main")


@pytest.mark.slow
def test_what_must_run_without_torch_does_not_load_it() -> None:
    loaded = gateway_loads() + loaded_by("ledger.main") + loaded_by("engine.scheduler", "engine.block_pool")
    assert not set.union(*loaded) & TORCH


def test_the_engine_knows_only_what_is_asked_of_a_model() -> None:
    assert {other for name in modules("engine") for other in graph()[name] if room_of(other) != "engine"} == {
        "protocol.generation"
    }


def test_the_core_knows_no_http() -> None:
    """What is admitted and started needs no connection: batches and responses in the background have none."""
    core, main = gateway_loads()
    assert (core & HTTP, main & HTTP) == (set(), HTTP)
    asgi = {name for name in modules("gateway") if "gateway.http.asgi" in graph()[name]}
    assert {name for name in asgi if not name.startswith("gateway.http.")} == {"gateway.app"}


@pytest.mark.parametrize("feature", ["idempotency", "responses", "batches"])
def test_a_feature_is_known_to_none_but_those_who_put_the_gateway_together(feature: str) -> None:
    """Whoever takes it out takes its lines there, and its settings, commands and pages."""
    importing = {
        name
        for name, others in graph().items()
        if any(other.startswith(f"gateway.{feature}") for other in others) and not name.startswith(f"gateway.{feature}")
    }
    assert importing <= {"gateway.app", "gateway.main"}


def test_webhooks_are_known_to_none_but_those_who_put_processes_together() -> None:
    """Whoever takes them out takes a gateway's two lines, and their settings, commands and pages."""
    importing = {
        name
        for name, others in graph().items()
        if any(other.startswith("ledger.webhooks") for other in others) and not name.startswith("ledger.webhooks")
    }
    assert {name for name in importing if room_of(name) not in {"console", "spillway"}} == {"gateway.main"}


def test_httpx_is_imported_in_one_place() -> None:
    pattern = re.compile(r"^\s*(import|from) httpx\b", re.MULTILINE)
    importing = [name for name, path in modules(*ALLOWED).items() if pattern.search(path.read_text())]
    assert importing == ["protocol.http_client"]


def test_the_ledger_needs_no_http_stack() -> None:
    [loaded] = loaded_by("ledger.main")
    assert not loaded & HTTP
