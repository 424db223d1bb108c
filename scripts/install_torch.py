"""Install the pinned torch, by default a CPU build, so that CUDA's gigabytes are never downloaded by accident.

Tries, in order: a wheel that this machine's own pip configuration offers without an index; PyTorch's CPU index; on
systems where the default index holds CPU builds (macOS, Windows), that index. pip finds and loads the wheel, since only
pip knows its configuration; uv unpacks it, in half the time. For a GPU set SPILLWAY_TORCH to a pip requirement, e.g.
``SPILLWAY_TORCH='torch==2.13.0' make run``, which is then installed with all it depends on.
"""

import argparse
import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TORCH_VERSION = "2.13.0"
CPU_INDEX = "https://download.pytorch.org/whl/cpu"
INDEX_TIMEOUT_S = 30
INDEX_RETRIES = 2


def installed(python: Path) -> bool:
    """Return whether the pinned version is installed, in any build."""
    return any(
        path.name.removesuffix(".dist-info").split("-")[1].split("+")[0] == TORCH_VERSION
        for path in python.parents[1].glob("lib/python3*/site-packages/torch-*.dist-info")
    )


def attempts() -> list[tuple[str, list[str]]]:
    """Return the sources to try, as (description, arguments of pip download)."""
    plain = ["--no-deps", f"torch=={TORCH_VERSION}"]
    found = [("a wheel offered by this machine's pip configuration", ["--no-index", *plain])]
    if platform.system() == "Linux":
        limits = ["--retries", str(INDEX_RETRIES), "--timeout", str(INDEX_TIMEOUT_S)]
        index = [*limits, "--index-url", CPU_INDEX, "--no-deps", f"torch=={TORCH_VERSION}+cpu"]
        return [*found, ("PyTorch's CPU index", index)]
    return [*found, ("the default index", plain)]


def load(pip: list[str], folder: Path) -> Path | None:
    """Download the wheel into the folder; return its path, or None with the error on stderr."""
    failures = []
    for description, arguments in attempts():
        print(f"torch {TORCH_VERSION}: trying {description}", flush=True)
        command = [*pip, "download", "--dest", str(folder), *arguments]
        done = subprocess.run(
            command, check=False, stderr=subprocess.PIPE, text=True, env={**os.environ, "TMPDIR": str(folder)}
        )
        if done.returncode == 0:
            return next(folder.glob("torch-*.whl"))
        failures.append(f"{description}: {done.stderr.strip().splitlines()[-1:] or 'failed'}")
    print("No CPU build of torch could be installed:", *failures, sep="\n  ", file=sys.stderr)
    print("Install one into .venv yourself, or set SPILLWAY_TORCH (see scripts/install_torch.py).", file=sys.stderr)
    return None


def main() -> int:
    """Install torch; return 0 only if the pinned version is installed afterwards."""
    parser = argparse.ArgumentParser(description="Install the pinned torch.")
    parser.add_argument("--python", type=Path, required=True, help="the Python of the environment to install it into")
    parser.add_argument("--download-only", action="store_true", help="leave the wheel for the next call")
    options = parser.parse_args()
    python = options.python.absolute()
    pip = [sys.executable, "-m", "pip", "--python", str(python), "--disable-pip-version-check"]
    if chosen := os.environ.get("SPILLWAY_TORCH"):
        if options.download_only:
            return 0
        print(f"torch: trying SPILLWAY_TORCH={chosen}", flush=True)
        return subprocess.run([*pip, "install", *chosen.split()], check=False).returncode
    if installed(python):
        return 0
    folder = python.parents[1] / ".torch"
    folder.mkdir(exist_ok=True)
    wheel = next(folder.glob(f"torch-{TORCH_VERSION}*.whl"), None) or load(pip, folder)
    if wheel is None or options.download_only:
        return 1 if wheel is None else 0
    # A separate cache on the same file system: unpacked files are hard-linked, not copied. Our
    # configuration excludes torch from uv's lock.
    uv = [str(ROOT / ".venv/bin/uv"), "pip", "install", "--no-config", "--offline", "--no-deps"]
    where = ["--python", str(python), "--cache-dir", str(folder / "cache")]
    subprocess.run([*uv, *where, str(wheel)], check=False)
    shutil.rmtree(folder)
    return 0 if installed(python) else 1


if __name__ == "__main__":
    sys.exit(main())
