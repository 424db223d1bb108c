"""Runs the code of another commit with the packages of this one."""

import subprocess
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[1]
# Releases up to 66518132 look up the version of a package of this name.
OLDER_NAME: Final = "spillway"


def unpack(commit: str, folder: Path) -> None:
    """Unpack a commit into ``folder``, to be put on the search path of the processes that run it.

    Raises CalledProcessError, with git's message on stderr, if there is no such commit.
    """
    archive = subprocess.run(["git", "archive", commit], cwd=ROOT, stdout=subprocess.PIPE, check=True)
    folder.mkdir(parents=True, exist_ok=True)
    subprocess.run(["tar", "--extract"], cwd=folder, input=archive.stdout, check=True)
    described = folder / f"{OLDER_NAME}-0.1.0.dist-info" / "METADATA"
    described.parent.mkdir()
    described.write_text(f"Metadata-Version: 2.1\nName: {OLDER_NAME}\nVersion: 0.1.0\n")
