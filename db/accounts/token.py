"""API keys and session tokens: their format, and the hash that is stored."""

import hmac
import os
import secrets
import string
from pathlib import Path
from typing import Final

from pydantic import SecretStr

from db.accounts.errors import PepperError

TOKEN_PREFIX: Final = "sk-sw-"  # noqa: S105
TOKEN_CHARS: Final = 43  # 43 · log2(62) = 256.03 random bits
MAX_TOKEN_CHARS: Final = 256  # longer than every valid key: rejected without hashing
BASE62: Final = string.digits + string.ascii_letters
ID_CHARS: Final = 16


def new_token() -> str:
    """Create a key: ``sk-sw-`` and 43 random base62 characters (256 bits)."""
    return TOKEN_PREFIX + "".join(secrets.choice(BASE62) for _ in range(TOKEN_CHARS))


def new_session_token() -> str:
    """Create a session token: 43 random base62 characters (256 bits)."""
    return "".join(secrets.choice(BASE62) for _ in range(TOKEN_CHARS))


def new_id(prefix: str) -> str:
    """Create a public id: the prefix and 16 random base62 characters (95 bits, enough to be unique)."""
    return prefix + "".join(secrets.choice(BASE62) for _ in range(ID_CHARS))


def hash_token(token: str, pepper: SecretStr) -> str:
    """Return the stored form of a key: its HMAC-SHA-256 (RFC 2104) under the pepper, in hex.

    A slow password hash would add nothing: the key is random, not chosen by a person. Without the pepper, a stolen
    database cannot be used to recognize keys.
    """
    return hmac.digest(pepper.get_secret_value().encode(), token.encode(), "sha256").hex()


# --- pepper -----------------------------------------------------------------------------------------------------------
#
# The pepper: a secret of the installation, stored outside the database.

PEPPER_FILE: Final = "key-pepper"
PEPPER_BYTES: Final = 32


def load_or_create_pepper(data_dir: Path) -> SecretStr:
    """Read the pepper of this data folder, or create it the first time. Only the owner may read the file.

    Safe when several processes start at the same time: all get the same pepper. Raises PepperError.
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
        raise PepperError(
            f"{path} must contain {PEPPER_BYTES} bytes in hex. Restore it from a backup; without it, no key is valid"
        )
    return SecretStr(pepper)


def _create(path: Path) -> None:
    """Write a temporary file and link it into place: readers never see a partial file, and the first writer wins."""
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
