"""The house's import rules (docs/ARCHITECTURE.md): two floors, and a gateway that needs no torch."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]

# package → what of ours it may import, besides itself
ALLOWED = {
    "protocol": set(),
    "engine": set(),
    "gateway": {"protocol"},
    "pool_worker": {"protocol", "engine"},
    "fleet": {"protocol"},
    "migrations": {"gateway.db"},
    "spillway": {"protocol", "engine", "gateway", "pool_worker", "fleet", "migrations"},
}


def imported_modules(path: Path) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            found.add(node.module or "")
    return found


def is_allowed(module: str, package: str) -> bool:
    if module.split(".", maxsplit=1)[0] in {package, *(set(sys.stdlib_module_names) - set(ALLOWED))}:
        return True
    if module.split(".", maxsplit=1)[0] not in ALLOWED:
        return True  # third party
    return any(module == allowed or module.startswith(f"{allowed}.") for allowed in ALLOWED[package])


@pytest.mark.parametrize("package", ALLOWED)
def test_package_imports_only_what_it_may(package: str) -> None:
    broken = [
        f"{path.relative_to(ROOT)} imports {module}"
        for path in (ROOT / package).rglob("*.py")
        for module in imported_modules(path)
        if not is_allowed(module, package)
    ]
    assert broken == []


def test_the_rule_would_catch_a_breach() -> None:
    assert not is_allowed("pool_worker.main", "gateway")
    assert not is_allowed("gateway.ledger", "migrations")
    assert is_allowed("gateway.db.models", "migrations")


@pytest.mark.parametrize(
    "module", ["gateway.main", "gateway.ledger.main", "spillway.cli", "engine.scheduler", "engine.block_pool"]
)
def test_what_must_run_without_torch_does_not_load_it(module: str) -> None:
    code = f"import sys, {module}; print([m for m in ('torch', 'transformers') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout.strip() == "[]"
