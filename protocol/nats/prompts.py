"""Prompts too large for a message: stored in an object bucket, where all workers can read, sealed by a key in the job.

So reading the bucket shows nothing to whoever was not given the job: not even whose request an object belongs to, as
its name is a digest.
"""

import hashlib
import os
from typing import Final

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from protocol.errors import ProtocolError

MAX_INLINE_PROMPT_BYTES: Final = 256 * 1024  # packed token ids; beyond it the prompt travels by reference
NONCE_BYTES: Final = 12
KEY_BYTES: Final = 32


def object_name(request_id: str, part: str) -> str:
    """Return the name of a part of a request: ``prompt`` or ``chat``."""
    return hashlib.sha256(f"{request_id} {part}".encode()).hexdigest()


class PromptKeys:
    """Makes the key of each request's objects, the same one whenever it is asked, of a secret of this process."""

    def __init__(self) -> None:
        self._secret = os.urandom(KEY_BYTES)

    def of(self, request_id: str) -> bytes:
        """Return the key of a request's objects."""
        return hashlib.blake2b(request_id.encode(), key=self._secret, digest_size=KEY_BYTES).digest()


def seal(data: bytes, key: bytes, name: str) -> bytes:
    """Encrypt the object of this name: 12 random bytes (the nonce), then AES-256-GCM (NIST SP 800-38D)."""
    nonce = os.urandom(NONCE_BYTES)
    return nonce + AESGCM(key).encrypt(nonce, data, name.encode())


def unseal(sealed: bytes, key: bytes, name: str) -> bytes:
    """Undo ``seal``. Raises ProtocolError."""
    try:
        return AESGCM(key).decrypt(sealed[:NONCE_BYTES], sealed[NONCE_BYTES:], name.encode())
    except (InvalidTag, ValueError) as error:
        raise ProtocolError(f"object {name} cannot be opened with the job's key") from error
