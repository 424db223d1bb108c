"""The code of another commit, which runs with the packages of this one."""

import subprocess
import tarfile
from io import BytesIO
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[1]
# Releases up to 66518132 ask for the version of a package of this name.
OLDER_NAME: Final = "spillway"


def unpack(commit: str, folder: Path) -> None:
    """Unpack a commit into ``folder``, which belongs on the search path of the processes that run it.

    Raises CalledProcessError, after git has said why, if there is no such commit.
    """
    archive = subprocess.run(["git", "archive", commit], cwd=ROOT, stdout=subprocess.PIPE, check=True)
    with tarfile.open(fileobj=BytesIO(archive.stdout)) as files:
        files.extractall(folder, filter="data")
    described = folder / f"{OLDER_NAME}-0.1.0.dist-info" / "METADATA"
    described.parent.mkdir()
    described.write_text(f"Metadata-Version: 2.1\nName: {OLDER_NAME}\nVersion: 0.1.0\n")
