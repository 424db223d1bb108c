"""Environments of peers: one virtual environment each, made on demand from a pinned set of packages."""

import subprocess
import sys
import venv
from pathlib import Path
from typing import Final

ENVIRONMENTS: Final = Path(__file__).resolve().parent.parent / ".peers"
INSTALL_TORCH: Final = Path(__file__).resolve().parents[2] / "scripts" / "install_torch.py"


def install(name: str, package: str, *, needs_torch: bool = False) -> str:
    """Make the environment that ``<name>.txt`` describes if it is not there; return the package's version in it.

    ``needs_torch`` installs torch first, as our own setup does. Raises CalledProcessError.
    """
    folder, requirements = ENVIRONMENTS / name, Path(__file__).with_name(f"{name}.txt")
    python, stamp = folder / "bin" / "python", folder / "installed.txt"
    if not stamp.exists() or stamp.read_text() != requirements.read_text():
        print(f"installing {name} into {folder}", file=sys.stderr)
        venv.create(folder, with_pip=True, clear=True)
        if needs_torch:
            subprocess.run([str(python), str(INSTALL_TORCH)], check=True, stdout=sys.stderr)
        pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        subprocess.run([*pip, "--no-deps", "-r", str(requirements)], check=True)
        stamp.write_text(requirements.read_text())
    ask = f"from importlib.metadata import version; print(version({package!r}))"
    return subprocess.run([str(python), "-c", ask], check=True, capture_output=True, text=True).stdout.strip()
