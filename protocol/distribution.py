"""Spillway as a package: its name on PyPI, its version, and what to type for an extra that is missing.

Command and module are ``spillway``; that name on PyPI is another project's.
"""

import contextlib
from collections.abc import Iterator
from importlib import metadata
from typing import Final

from protocol.errors import ExpectedError

NAME: Final = "spillway-gateway"


class MissingExtra(ExpectedError):
    """A setting needs packages that are not installed."""


def version() -> str:
    """Return the installed version; "unknown" where Spillway runs from its folder without being installed."""
    try:
        return metadata.version(NAME)
    except metadata.PackageNotFoundError:
        return "unknown"


def install_command(extra: str) -> str:
    """Return the command that installs Spillway with an extra."""
    return f"pip install '{NAME}[{extra}]'"


@contextlib.contextmanager
def needing(extra: str, *, key: str, error: type[ExpectedError] = MissingExtra) -> Iterator[None]:
    """Import what an extra brings. Raises ``error``, which names the setting ``key`` and the command, without it."""
    try:
        yield
    except ImportError as cause:
        raise error(f"{key}: requires the extra {extra!r}: {install_command(extra)}") from cause
