"""Processes that we start: how they ended, and their environments.

Ours holds the database's password, the pepper and the queue's credentials.

``plain_environment``       a process that reads what a caller or a worker has sent: only what an interpreter needs
``without_own_variables``   an operator's program, which has variables of its own in ours: all but Spillway's
"""

import os
import signal
import sys
from collections.abc import Mapping
from typing import Final

OWN_VARIABLES: Final = "SPILLWAY_"
# Where programs and libraries lie, and how texts, times and temporary files are dealt with.
_PLAIN: Final = (
    "PATH", "LD_LIBRARY_PATH", "LANG", "LC_ALL", "LC_CTYPE", "TZ", "TMPDIR",
    "PYTHONHOME", "PYTHONDONTWRITEBYTECODE", "PYTHONPYCACHEPREFIX",
)  # fmt: skip


def ending(code: int) -> str:
    """Return how a process ended, for a message: ``exit code 3`` or ``signal SIGSEGV``."""
    if code >= 0:
        return f"exit code {code}"
    known = {one.value: one.name for one in signal.Signals}
    return f"signal {known.get(-code, -code)}"


def plain_environment() -> dict[str, str]:
    """Return the environment of a Python process that needs no secret, with the same import path as ours."""
    kept = {name: os.environ[name] for name in _PLAIN if name in os.environ}
    return {**kept, "PYTHONPATH": os.pathsep.join(sys.path)}


def without_own_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Return an environment without the variables that configure Spillway, secrets included."""
    return {name: value for name, value in environment.items() if not name.upper().startswith(OWN_VARIABLES)}
