"""The API key itself, and the token of a session: how they look and what is kept of them."""

import hmac
import secrets
import string
from typing import Final

from pydantic import SecretStr

TOKEN_PREFIX: Final = "sk-sw-"  # noqa: S105
TOKEN_CHARS: Final = 43  # 43 · log2(62) = 256.03 random bits
MAX_TOKEN_CHARS: Final = 256  # longer than any key we ever made: not worth hashing
BASE62: Final = string.digits + string.ascii_letters
ID_CHARS: Final = 16


def new_token() -> str:
    """Make a key: ``sk-sw-`` and 43 random base62 characters (256 bits)."""
    return TOKEN_PREFIX + "".join(secrets.choice(BASE62) for _ in range(TOKEN_CHARS))


def new_session_token() -> str:
    """Make the token of a session: 43 random base62 characters (256 bits)."""
    return "".join(secrets.choice(BASE62) for _ in range(TOKEN_CHARS))


def new_id(prefix: str) -> str:
    """Make an id that is public: the prefix and 16 random base62 characters (95 bits: no two are ever equal)."""
    return prefix + "".join(secrets.choice(BASE62) for _ in range(ID_CHARS))


def hash_token(token: str, pepper: SecretStr) -> str:
    """Return the stored form of a key: its HMAC-SHA-256 (RFC 2104) under the pepper, in hex.

    A slow password hash would add nothing: the key is random, not chosen by a person. The pepper keeps a stolen
    database from being of use for recognising keys.
    """
    return hmac.digest(pepper.get_secret_value().encode(), token.encode(), "sha256").hex()
