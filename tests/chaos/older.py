"""The older release of an upgrade: its code, unpacked where it is asked for, with this one's packages and few more."""

import os
import re
import subprocess
import sys
from pathlib import Path

from benchmarks.older_code import unpack
from migrations import BRIDGE

OLDER_COMMIT = BRIDGE.removeprefix("commit ")  # no older one's database is upgraded
NEW_SUMS = frozenset({"unpriced_tokens"})  # rollups that its ledger writer does not add to: docs/how-to/upgrades.md
ITS_PACKAGES = ("authlib==1.9.9",)  # that this release does without
MIGRATE = "import sys; from migrations import upgrade; upgrade(sys.argv[1])"


def unpack_older(folder: Path) -> dict[str, str]:
    """The environment in which Python runs the older release's code, unpacked into ``folder``."""
    unpack(OLDER_COMMIT, folder)
    return {"PYTHONPATH": str(folder), "PYTHONSAFEPATH": "1"}


def install_its_packages(folder: Path) -> None:
    """Put the packages that only the older release has beside its code."""
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps"]
    subprocess.run([*pip, "--target", str(folder), *ITS_PACKAGES], check=True, stdout=sys.stderr)


def create_older_schema(environment: dict[str, str], database_url: str) -> None:
    """Create the tables of the older release."""
    subprocess.run([sys.executable, "-c", MIGRATE, database_url], env=os.environ | environment, check=True)


def create_older_key(environment: dict[str, str], config: Path, name: str) -> str:
    """Create an API key by the older release, whose schema may lack columns of this one; return the key."""
    create = [sys.executable, "-m", "spillway", "keys", "create", name, "--config", str(config)]
    done = subprocess.run(create, env=os.environ | environment, check=True, capture_output=True, text=True)
    found = re.search(r"sk-sw-\w+", done.stdout)
    assert found is not None, done.stdout
    return found[0]
