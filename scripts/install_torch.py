"""Install the pinned torch: a CPU build unless told otherwise, and never gigabytes of CUDA by accident.

Tries, in order: a wheel that this machine's own pip configuration offers without an index; PyTorch's CPU index; on
systems where the default index holds CPU builds (macOS, Windows), that index. For a GPU set SPILLWAY_TORCH to a pip
requirement, e.g. ``SPILLWAY_TORCH='torch==2.13.0' make run``, which is then installed with all it depends on.
"""

import os
import platform
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version

TORCH_VERSION = "2.13.0"
CPU_INDEX = "https://download.pytorch.org/whl/cpu"
INDEX_TIMEOUT_S = 30
INDEX_RETRIES = 2

PIP = [sys.executable, "-m", "pip", "install", "--disable-pip-version-check"]


def installed() -> bool:
    """Return whether the pinned version is installed already, in any build."""
    try:
        return version("torch").split("+")[0] == TORCH_VERSION
    except PackageNotFoundError:
        return False


def attempts() -> list[tuple[str, list[str]]]:
    """Return what to try, as (description, pip arguments)."""
    chosen = os.environ.get("SPILLWAY_TORCH")
    if chosen:
        return [(f"SPILLWAY_TORCH={chosen}", chosen.split())]
    plain = ["--no-deps", f"torch=={TORCH_VERSION}"]
    found = [("a wheel offered by this machine's pip configuration", ["--no-index", *plain])]
    if platform.system() == "Linux":
        limits = ["--retries", str(INDEX_RETRIES), "--timeout", str(INDEX_TIMEOUT_S)]
        index = [*limits, "--index-url", CPU_INDEX, "--no-deps", f"torch=={TORCH_VERSION}+cpu"]
        return [*found, ("PyTorch's CPU index", index)]
    return [*found, ("the default index", plain)]


def main() -> int:
    """Install torch; the exit code is 0 only if the pinned version is there afterwards."""
    if installed() and "SPILLWAY_TORCH" not in os.environ:
        return 0
    failures = []
    for description, arguments in attempts():
        print(f"torch {TORCH_VERSION}: trying {description}", flush=True)
        done = subprocess.run([*PIP, *arguments], check=False, stderr=subprocess.PIPE, text=True)
        if done.returncode == 0:
            return 0
        failures.append(f"{description}: {done.stderr.strip().splitlines()[-1:] or 'failed'}")
    print("No CPU build of torch could be installed:", *failures, sep="\n  ", file=sys.stderr)
    print("Install one into .venv yourself, or set SPILLWAY_TORCH (see scripts/install_torch.py).", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
