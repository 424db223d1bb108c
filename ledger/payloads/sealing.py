"""Payloads at rest: compressed, and encrypted if a key is configured.

``zlib``                             RFC 1950
``zlib+aes-256-gcm-siv:<key id>``    12 random bytes (the nonce), then AES-256-GCM-SIV (RFC 8452) of the former
``zlib+aes-256-gcm:<key id>``        the same with AES-256-GCM (NIST SP 800-38D), used by earlier releases

Two payloads with the same key and nonce break AES-GCM, so random nonces allow 2³² payloads per key, some months of a
busy installation. With AES-GCM-SIV, two such payloads reveal only whether they are equal.

The additional data of each ciphertext names its request and part, so that ciphertexts cannot be swapped. A key's id is
the start of its hash: it identifies the payloads that the key decrypts without revealing the key.
"""

import base64
import binascii
import hashlib
import os
import zlib
from collections.abc import Sequence
from typing import Final, Literal

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM, AESGCMSIV
from pydantic import SecretStr

from ledger.payloads.errors import BadPayloadKey, BrokenPayload, PayloadKeyMissing, TooLargeToOpen

KEY_BYTES: Final = 32
NONCE_BYTES: Final = 12
KEY_ID_CHARS: Final = 8
PLAIN: Final = "zlib"
SEALED: Final = "zlib+aes-256-gcm-siv"
SEALED_BEFORE: Final = "zlib+aes-256-gcm"
MAX_OPENED_BYTES: Final = 64 * 1024 * 1024  # maximum size of a decompressed payload

Part = Literal["request", "answer"]
Kind = Literal["zlib+aes-256-gcm-siv", "zlib+aes-256-gcm"]


class Sealer:
    """Seals with the first key and opens with any key. Without keys, it only compresses."""

    def __init__(self, keys: Sequence[bytes] = (), kind: Kind = SEALED) -> None:
        """``kind``: the cipher for sealing. Payloads of both ciphers can be opened."""
        self._kind = kind
        self._newest = None if not keys else key_id(keys[0])
        self._ciphers: dict[tuple[str, str], AESGCM | AESGCMSIV] = {}
        for key in keys:
            self._ciphers[SEALED, key_id(key)] = AESGCMSIV(key)
            self._ciphers[SEALED_BEFORE, key_id(key)] = AESGCM(key)

    @property
    def encoding(self) -> str:
        """The encoding that ``seal`` writes."""
        return PLAIN if self._newest is None else f"{self._kind}:{self._newest}"

    def seal(self, data: bytes, request_id: str, part: Part) -> bytes:
        """Compress and, with a key, encrypt."""
        packed = zlib.compress(data)
        if self._newest is None:
            return packed
        nonce = os.urandom(NONCE_BYTES)
        return nonce + self._ciphers[self._kind, self._newest].encrypt(nonce, packed, _label(request_id, part))

    def open(
        self, sealed: bytes, encoding: str, request_id: str, part: Part, max_bytes: int = MAX_OPENED_BYTES
    ) -> bytes:
        """Undo ``seal``, decompressing ``max_bytes`` at most.

        Raises PayloadKeyMissing, BrokenPayload, and TooLargeToOpen above that size.
        """
        kind, _, key = encoding.partition(":")
        if kind in {SEALED, SEALED_BEFORE}:
            sealed = self._decrypted(sealed, kind, key, request_id, part)
        elif encoding != PLAIN:
            raise BrokenPayload(f"the payload of {request_id} has the unknown encoding {encoding!r}")
        unpacker = zlib.decompressobj()
        try:
            data = unpacker.decompress(sealed, max_bytes + 1)
        except zlib.error as error:
            raise BrokenPayload(f"the {part} of {request_id} cannot be decompressed: {error}") from error
        if len(data) > max_bytes:
            raise TooLargeToOpen(f"the {part} of {request_id} is larger than {max_bytes} bytes")
        if not unpacker.eof:
            raise BrokenPayload(f"the {part} of {request_id} is incomplete")
        return data

    def _decrypted(self, sealed: bytes, kind: str, key: str, request_id: str, part: Part) -> bytes:
        cipher = self._ciphers.get((kind, key))
        if cipher is None:
            raise PayloadKeyMissing(
                f"the payload of {request_id} is encrypted with the key {key}, which is not in payloads.key"
            )
        try:
            return cipher.decrypt(sealed[:NONCE_BYTES], sealed[NONCE_BYTES:], _label(request_id, part))
        except (InvalidTag, ValueError) as error:
            raise BrokenPayload(f"the {part} of {request_id} has been changed since it was encrypted") from error


def _label(request_id: str, part: Part) -> bytes:
    return f"spillway/{request_id}/{part}".encode()


def key_id(key: bytes) -> str:
    """Return the id of a key, which does not reveal the key."""
    return hashlib.sha256(b"spillway payload key " + key).hexdigest()[:KEY_ID_CHARS]


def parse_keys(text: SecretStr | None) -> list[bytes]:
    """Parse the setting ``payloads.key``: keys in hex or base64, newest first. Raises BadPayloadKey."""
    if text is None:
        return []
    words = text.get_secret_value().split()
    if not words:
        raise BadPayloadKey("it contains no key")
    return [_key(word) for word in words]


def _key(word: str) -> bytes:
    try:
        key = bytes.fromhex(word) if len(word) == 2 * KEY_BYTES else base64.b64decode(word, validate=True)
    except (ValueError, binascii.Error):
        key = b""
    if len(key) != KEY_BYTES:
        raise BadPayloadKey(f"a key must be {KEY_BYTES} random bytes in hex (`openssl rand -hex 32`)")
    return key
