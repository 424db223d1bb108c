"""The wheel, made as the images make it: ``pip wheel``, without an index."""

import subprocess
import sys
from pathlib import Path

from tests.unit.deploy.description import ROOT

PIP = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input"]


def tracked_files(*folders: str) -> list[str]:
    """Return what git has, or would take, of these folders of the repository; of all without any."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", "--", *folders]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return [name for name in listed.split("\0") if (ROOT / name).is_file()]


def build_wheel(folder: Path) -> Path:
    """Build it in an empty folder, whose ``source`` then links to the sources: nothing is left beside these."""
    source = folder / "source"
    source.mkdir()
    for name in {name.split("/", maxsplit=1)[0] for name in tracked_files()}:
        (source / name).symlink_to(ROOT / name)
    options = ["--no-deps", "--no-build-isolation", "--no-index", "--wheel-dir", str(folder)]
    done = subprocess.run([*PIP, "wheel", *options, "."], cwd=source, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    [wheel] = folder.glob("*.whl")
    return wheel
