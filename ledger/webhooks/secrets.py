"""Secrets of endpoints: signing deliveries, and storing the secrets encrypted.

The scheme is that of https://www.standardwebhooks.com (spec/standard-webhooks.md, "Signature scheme", v1): the
HMAC-SHA-256 of id, timestamp and body. In SQL a secret is encrypted by a key derived from the installation's pepper.
"""

import base64
import hashlib
import hmac
import os
from collections.abc import Iterable
from typing import Final

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from pydantic import SecretStr

PREFIX: Final = "whsec_"
SECRET_BYTES: Final = 32  # the scheme asks for 24 to 64
_NONCE_BYTES: Final = 12
_KEY_BYTES: Final = 32


class SecretError(Exception):
    """A secret in SQL cannot be decrypted: it was encrypted with another ``auth.pepper``."""


def new_secret() -> str:
    """Create a secret in the format that is shown once."""
    return PREFIX + base64.b64encode(os.urandom(SECRET_BYTES)).decode()


def signatures(secrets: Iterable[str], message_id: str, unix_s: int, body: bytes) -> str:
    """Return the value of ``webhook-signature``: one signature per secret."""
    signed = b"%s.%d.%s" % (message_id.encode(), unix_s, body)
    keys = [base64.b64decode(secret.removeprefix(PREFIX)) for secret in secrets]
    return " ".join("v1," + base64.b64encode(hmac.digest(key, signed, hashlib.sha256)).decode() for key in keys)


class SecretBox:
    """Seals secrets for SQL and opens them. A secret belongs to its endpoint: its id is authenticated with it."""

    def __init__(self, pepper: SecretStr) -> None:
        key = HKDF(SHA256(), _KEY_BYTES, salt=None, info=b"spillway webhook secrets")
        self._cipher = AESGCM(key.derive(pepper.get_secret_value().encode()))

    def seal(self, secret: str, endpoint_id: str) -> str:
        """Return base64 of a nonce and AES-256-GCM of the secret."""
        nonce = os.urandom(_NONCE_BYTES)
        return base64.b64encode(nonce + self._cipher.encrypt(nonce, secret.encode(), endpoint_id.encode())).decode()

    def open(self, sealed: str, endpoint_id: str) -> str:
        """Undo ``seal``. Raises SecretError."""
        data = base64.b64decode(sealed)
        try:
            return self._cipher.decrypt(data[:_NONCE_BYTES], data[_NONCE_BYTES:], endpoint_id.encode()).decode()
        except (InvalidTag, ValueError) as error:
            raise SecretError(
                f"the secret of {endpoint_id} was encrypted with another auth.pepper. Restore it or rotate the secret"
            ) from error
