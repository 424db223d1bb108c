"""Copies of the tree, in which the product is changed and tests run."""

import hashlib
import itertools
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_JUDGES = ("tests/mutants/", "tests/planted/")  # change nothing of what they judge
_MOMENTS = itertools.count(1)


def tree_digest(root: Path) -> str:
    """Tell one state of product and tests from another."""
    digest = hashlib.sha256()
    for name in _files(root):
        if name.endswith(".py") and not name.startswith(_JUDGES):
            digest.update(f"{name}\0".encode() + (root / name).read_bytes())
    return digest.hexdigest()[:16]


def copy_tree(root: Path, copy: Path) -> None:
    """Copy what git knows or would; the virtual environment is used where it is."""
    (copy / "compiled").mkdir(parents=True)  # what one run has compiled of the engine's C serves the next
    for name in _files(root):
        (copy / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(root / name, copy / name)


def _files(root: Path) -> list[str]:
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=root, check=True, capture_output=True, text=True).stdout
    return sorted(name for name in listed.split("\0") if name and (root / name).is_file())


@contextmanager
def changed(path: Path, code: str) -> Iterator[None]:
    """Put other code into a module, and its own back at the end."""
    own, of_own = path.read_text(), path.stat()
    path.write_text(code)
    moment = next(_MOMENTS)
    os.utime(path, (moment, moment))  # bytecode is known by this time in seconds, and the size: never by another's
    try:
        yield
    finally:
        path.write_text(own)
        os.utime(path, ns=(of_own.st_atime_ns, of_own.st_mtime_ns))
