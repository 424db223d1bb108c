"""The pepper: a secret of the installation, kept beside the data and never in the database."""

import os
import secrets
from pathlib import Path
from typing import Final

from pydantic import SecretStr

from db.accounts.errors import PepperError

PEPPER_FILE: Final = "key-pepper"
PEPPER_BYTES: Final = 32


def load_or_create_pepper(data_dir: Path) -> SecretStr:
    """Read the pepper of this data folder, making it the first time; only its owner may read the file.

    Safe when several processes start at once: all get the same. Raises PepperError.
    """
    path = data_dir / PEPPER_FILE
    try:
        data_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not path.exists():
            _create(path)
        pepper = path.read_text().strip()
    except OSError as error:
        raise PepperError(f"cannot read or create {path}: {error}") from error
    if len(pepper) < 2 * PEPPER_BYTES:
        raise PepperError(f"{path} holds no pepper of {PEPPER_BYTES} bytes in hex; restore it, or all keys are lost")
    return SecretStr(pepper)


def _create(path: Path) -> None:
    """Write a file of our own, then link it into place: nobody ever sees it half written, and the first one wins."""
    own = path.with_name(f"{path.name}.{secrets.token_hex(8)}")
    descriptor = os.open(own, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(descriptor, "w") as file:
            file.write(secrets.token_hex(PEPPER_BYTES))
            file.flush()
            os.fsync(file.fileno())
        path.hardlink_to(own)
    except FileExistsError:
        pass
    finally:
        own.unlink()
