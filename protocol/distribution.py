"""Spillway as a package: its name on PyPI, its version, and the command that installs a missing extra.

The command and the module are named ``spillway``; that name on PyPI belongs to another project.
"""

import contextlib
from collections.abc import Iterator
from importlib import metadata
from typing import Final

from protocol.errors import ExpectedError

NAME: Final = "spillway-gateway"


class MissingExtra(ExpectedError):
    """Raised when a setting requires packages that are not installed."""


def version() -> str:
    """Return the installed version; "unknown" if Spillway runs from its folder without being installed."""
    try:
        return metadata.version(NAME)
    except metadata.PackageNotFoundError:
        return "unknown"


def install_command(extra: str) -> str:
    """Return the command that installs Spillway with an extra."""
    return f"pip install '{NAME}[{extra}]'"


@contextlib.contextmanager
def needing(extra: str, *, key: str, error: type[ExpectedError] = MissingExtra) -> Iterator[None]:
    """Guard imports from an extra. Raises ``error`` with the setting ``key`` and the command if it is missing."""
    try:
        yield
    except ImportError as cause:
        raise error(f"{key}: requires the extra {extra!r}: {install_command(extra)}") from cause
