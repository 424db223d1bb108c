"""The planted faults, and the tests that should notice them."""

import tomllib
from pathlib import Path

import msgspec

UNIT = "tests/unit/gateway"
INTEGRATION = "tests/integration/gateway"
BELOW = ("tokenizing",)  # imports none of the packages that have faults
SIMULATED = ("admission", "dispatch", "limits")


class Fault(msgspec.Struct, frozen=True):
    """A mistake in one file."""

    name: str
    breaks: str  # the promise
    file: str
    old: str  # occurs once
    new: str
    near: tuple[str, ...]  # words in the names of integration tests
    test: str  # notices it; without parameters

    @property
    def package(self) -> str:
        """The package of the gateway that it is in."""
        return Path(self.file).parts[1]

    def planted(self, root: Path) -> str:
        """Return the code with the mistake. Raises ValueError where the code has moved."""
        code = (root / self.file).read_text()
        if code.count(self.old) != 1:
            raise ValueError(f"{self.name}: its old text occurs {code.count(self.old)} times in {self.file}")
        return code.replace(self.old, self.new)

    def unit_tests(self, root: Path) -> list[str]:
        """Return the folder of its package's unit tests, if there are any."""
        return [name for name in _unit_folders(root) if name == f"{UNIT}/{self.package}"]

    def other_unit_tests(self, root: Path) -> list[str]:
        """Return the folders of the gateway's other unit tests."""
        return [name for name in _unit_folders(root) if name != f"{UNIT}/{self.package}"]

    def integration_tests(self, root: Path) -> list[str]:
        """Return the files of integration tests near by."""
        return [name for name in _files(root, "**") if any(word in Path(name).stem for word in self.near)]

    def other_integration_tests(self, root: Path) -> list[str]:
        """Return the other integration tests of its part of the gateway."""
        part = self.package if (root / INTEGRATION / self.package).is_dir() else "."
        return [name for name in _files(root, part) if name not in self.integration_tests(root)]


def _unit_folders(root: Path) -> list[str]:
    folders = {path.parent.name for path in (root / UNIT).glob("*/test_*.py")} - {*BELOW}
    return [f"{UNIT}/{name}" for name in sorted(folders)]


def _files(root: Path, pattern: str) -> list[str]:
    return sorted(str(path.relative_to(root)) for path in (root / INTEGRATION).glob(f"{pattern}/test_*.py"))


def load_faults() -> list[Fault]:
    """Return all of them."""
    content = tomllib.loads(Path(__file__).with_name("faults.toml").read_text())
    return msgspec.convert(content["fault"], list[Fault])
