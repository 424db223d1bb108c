"""Environments of peers: one virtual environment each, made on demand from a pinned set of packages."""

import subprocess
import sys
from pathlib import Path
from typing import Final

ENVIRONMENTS: Final = Path(__file__).resolve().parent.parent / ".peers"
INSTALL_TORCH: Final = Path(__file__).resolve().parents[2] / "scripts" / "install_torch.py"


def install(name: str, package: str, *, needs_torch: bool = False, base: str = sys.executable) -> str:
    """Create the environment described by ``<name>.txt`` if it does not exist; return the package's version in it.

    ``needs_torch`` installs torch first, as Spillway's setup does; ``base`` is the Python to use. Raises
    CalledProcessError.
    """
    folder, requirements = ENVIRONMENTS / name, Path(__file__).with_name(f"{name}.txt")
    python, stamp = folder / "bin" / "python", folder / "installed.txt"
    if not stamp.exists() or stamp.read_text() != requirements.read_text():
        print(f"installing {name} into {folder}", file=sys.stderr)
        subprocess.run([base, "-m", "venv", "--clear", str(folder)], check=True, stdout=sys.stderr)
        if needs_torch:
            subprocess.run([sys.executable, str(INSTALL_TORCH), "--python", str(python)], check=True, stdout=sys.stderr)
        pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        subprocess.run([*pip, "--no-deps", "-r", str(requirements)], check=True)
        stamp.write_text(requirements.read_text())
    ask = f"from importlib.metadata import version; print(version({package!r}))"
    return subprocess.run([str(python), "-c", ask], check=True, capture_output=True, text=True).stdout.strip()
