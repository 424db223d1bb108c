"""Password hashes: scrypt (RFC 7914), salted, stored with their cost parameters."""

import base64
import hashlib
import hmac
import secrets
from typing import Final

from db.accounts.errors import BadPassword
from db.accounts.token import BASE62

# 16 MiB and about 0.1 s per check: one of the equally strong settings of OWASP's password storage cheat sheet.
COST: Final = 2**14
BLOCK_SIZE: Final = 8
PARALLELISM: Final = 5
SALT_BYTES: Final = 16
HASH_BYTES: Final = 32
MAX_MEMORY_BYTES: Final = 64 * 1024 * 1024
MIN_PASSWORD_CHARS: Final = 12
MAX_PASSWORD_CHARS: Final = 256
NEW_PASSWORD_CHARS: Final = 20  # 119 random bits
# In the same format and as slow to check, but no known password has this hash.
DUMMY_HASH: Final = f"scrypt${COST}${BLOCK_SIZE}${PARALLELISM}${'A' * 22}==${'A' * 43}="


def new_password() -> str:
    """Generate a password of letters and digits."""
    return "".join(secrets.choice(BASE62) for _ in range(NEW_PASSWORD_CHARS))


def hash_password(password: str, cost: int = COST) -> str:
    """Return the stored form of a password: ``scrypt$N$r$p$salt$hash``. Takes about 0.1 s. Raises BadPassword."""
    if not MIN_PASSWORD_CHARS <= len(password) <= MAX_PASSWORD_CHARS:
        raise BadPassword(f"a password must have {MIN_PASSWORD_CHARS} to {MAX_PASSWORD_CHARS} characters")
    salt = secrets.token_bytes(SALT_BYTES)
    digest = _scrypt(password, salt, cost, BLOCK_SIZE, PARALLELISM)
    return f"scrypt${cost}${BLOCK_SIZE}${PARALLELISM}${_text(salt)}${_text(digest)}"


def is_password(password: str, stored: str) -> bool:
    """Report whether a password has this hash; compares in constant time. Takes about 0.1 s."""
    if len(password) > MAX_PASSWORD_CHARS:
        return False
    _, cost, block_size, parallelism, salt, digest = stored.split("$")
    found = _scrypt(password, base64.b64decode(salt), int(cost), int(block_size), int(parallelism))
    return hmac.compare_digest(found, base64.b64decode(digest))


def _scrypt(password: str, salt: bytes, cost: int, block_size: int, parallelism: int) -> bytes:
    return hashlib.scrypt(
        password.encode(),
        salt=salt,
        n=cost,
        r=block_size,
        p=parallelism,
        maxmem=MAX_MEMORY_BYTES,
        dklen=HASH_BYTES,
    )


def _text(data: bytes) -> str:
    return base64.b64encode(data).decode()
