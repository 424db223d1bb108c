"""Processes that we start say which environment they get: ours holds the database's password and the pepper."""

import ast
from pathlib import Path

import pytest

from tests.unit.house.test_import_layers import ALLOWED, ROOT, modules

pytestmark = pytest.mark.slow

STARTS = {
    "asyncio.create_subprocess_exec", "asyncio.create_subprocess_shell", "subprocess.Popen", "subprocess.run",
    "os.posix_spawn", "os.posix_spawnp",
}  # fmt: skip
# What gets ours, and why it may.
GETS_OURS = {
    "spillway/embedded_nats.py": "nats-server, which reads nothing of it but what its configuration names",
    "pool_worker/engines/sidecar/keeper.py": "the inference server; the worker has taken our variables out",
    "engine/cpu/native.py": "the compiler, of our own source",
    "fleet/drivers/process.py": "a worker on this machine, which is configured by it",
}


def starts(path: Path) -> list[ast.Call]:
    calls = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)]
    return [call for call in calls if ast.unparse(call.func) in STARTS]


def test_no_process_inherits_our_environment_unless_it_may() -> None:
    calls = {str(path.relative_to(ROOT)): starts(path) for path in modules(*ALLOWED).values()}
    without = {
        name for name, found in calls.items() for call in found if "env" not in {word.arg for word in call.keywords}
    }
    assert without == set(GETS_OURS)
    assert sum(map(len, calls.values())) >= 8
