"""Another commit's code, to run beside this one's: unpacked where it is asked for, with this one's dependencies."""

import re
import subprocess
import tarfile
from io import BytesIO
from pathlib import Path

from db.engine import SCHEMA_VERSION

OLDER_COMMITS = (
    "6bc8f17",  # the last one before the rooms
    "f364b7c",  # knows neither intents nor parked payloads, and its schema is older
)
ROOT = Path(__file__).parents[2]


def unpack_older(commit: str, folder: Path) -> dict[str, str]:
    """The environment in which Python runs an older commit's code, unpacked into ``folder``."""
    archive = subprocess.run(["git", "archive", commit], cwd=ROOT, capture_output=True, check=False)
    assert archive.returncode == 0, f"the older commit is needed: {archive.stderr.decode()}"
    with tarfile.open(fileobj=BytesIO(archive.stdout)) as files:
        files.extractall(folder, filter="data")
    # It insists on the schema that it was written for; later ones take a newer one.
    [schema] = folder.glob("**/db/schema.py")
    schema.write_text(
        re.sub(
            r'^SCHEMA_VERSION: Final = "\d+"',
            f'SCHEMA_VERSION: Final = "{SCHEMA_VERSION}"',
            schema.read_text(),
            flags=re.MULTILINE,
        )
    )
    return {"PYTHONPATH": str(folder), "PYTHONSAFEPATH": "1"}
