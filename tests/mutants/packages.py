"""Which code is mutated, and which tests judge it."""

from dataclasses import dataclass
from pathlib import Path

INTEGRATION = "tests/integration/gateway"
SIMULATION = "tests/simulation/test_simulation.py"


@dataclass(frozen=True)
class Package:
    """A part of the product, and its tests as files, folders or patterns of them."""

    sources: tuple[str, ...]
    unit: tuple[str, ...]  # asked first
    further: tuple[str, ...]  # asked about what the unit tests do not notice
    unseen: tuple[str, ...] = ()  # of `further`: run the product in other processes, so coverage cannot tell what of it
    libraries: tuple[str, ...] = ()  # large ones that most of its tests load

    def source_files(self, root: Path) -> list[str]:
        """Return its modules, relative to ``root``."""
        files = [path for source in self.sources for path in _python_files(root / source)]
        return sorted(str(path.relative_to(root)) for path in files)

    def folders(self) -> list[str]:
        """Return the folders whose coverage is measured."""
        return sorted({source if not source.endswith(".py") else str(Path(source).parent) for source in self.sources})

    def is_unit(self, test: str) -> bool:
        """Say whether it is one of the unit tests."""
        return test.startswith(self.unit)


def _python_files(path: Path) -> list[Path]:
    return sorted(path.rglob("*.py")) if path.is_dir() else [path]


PACKAGES = {
    "dispatch": Package(
        sources=("gateway/dispatch", "gateway/request"),
        unit=("tests/unit/gateway/dispatch", "tests/unit/gateway/request"),
        further=(
            SIMULATION,
            *(
                f"{INTEGRATION}/test_{name}.py"
                for name in (
                    *("answers", "cancellation", "dead_letters", "detector", "errors", "failover", "frames", "hosted"),
                    *("intents", "lame_duck", "missing_streams", "revisions", "unforeseen", "unread"),
                )
            ),
        ),
    ),
    "admission": Package(
        sources=("gateway/admission",),
        unit=("tests/unit/gateway/admission",),
        further=(
            SIMULATION,
            *(f"{INTEGRATION}/test_{name}.py" for name in ("admission", "failover", "lame_duck", "limits")),
        ),
    ),
    "limits": Package(
        sources=("gateway/limits",),
        unit=("tests/unit/gateway/limits",),
        further=(
            SIMULATION,
            *(
                f"{INTEGRATION}/test_{name}.py"
                for name in ("errors", "hosted", "limits", "lost_accounts", "prompts", "quotas", "slow_body")
            ),
            "tests/integration/ledger/webhooks/test_budgets.py",
        ),
    ),
    "ledger": Package(
        sources=("ledger",),
        unit=("tests/unit/ledger",),
        further=(
            SIMULATION,
            "tests/integration/ledger",
            *(f"{INTEGRATION}/test_{name}.py" for name in ("dashboard", "intents", "payloads")),
            "tests/fleet/test_page.py",
        ),
        unseen=("tests/integration/ledger/test_writer_process.py",),
    ),
    "scheduler": Package(
        sources=("engine/scheduler.py", "engine/block_pool.py"),
        unit=("tests/unit/engine/test_block_pool.py", "tests/unit/engine/test_overload.py"),
        further=tuple(
            f"tests/unit/engine/test_{name}.py"
            for name in ("drafts", "engine", "leaks", "memory", "prompt_logprobs", "stats")
        ),
        libraries=("llguidance", "torch", "transformers"),
    ),
}
