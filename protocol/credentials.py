"""Credentials at the queue server: a user's JWT and the key that proves it, in a file of NATS' own kind (``.creds``).

The file is read for every connection: one that is replaced is in use from the next on, and the server ends a
connection when what it was made with expires or is revoked. So credentials change while everything runs.

Keys are NATS' "nkeys": Ed25519, in base32 with a letter for their kind and a checksum.
"""

import base64
import binascii
import json
import re
import ssl
from pathlib import Path
from typing import Any, Final, Literal, Self

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from protocol.errors import BusError
from protocol.permissions import inbox_prefix

Kind = Literal["operator", "account", "user"]

_PREFIXES: Final[dict[Kind, int]] = {"operator": 14 << 3, "account": 0, "user": 20 << 3}
_SEED: Final = 18 << 3
_BLOCK: Final = re.compile(r"-----BEGIN ([A-Z ]+)-----\s+(\S+)\s+-+END [A-Z ]+-+")
_JWT: Final = "NATS USER JWT"
_NKEY: Final = "USER NKEY SEED"


class CredentialsError(BusError):
    """The credentials for the queue server cannot be used; the message says why."""


class Key:
    """A key pair of NATS' kind."""

    def __init__(self, kind: Kind, private: Ed25519PrivateKey) -> None:
        self._private = private
        self._prefix = _PREFIXES[kind]
        self.public = _base32(bytes([self._prefix]) + private.public_key().public_bytes_raw())

    @classmethod
    def new(cls, kind: Kind) -> Self:
        """Generate one."""
        return cls(kind, Ed25519PrivateKey.generate())

    @classmethod
    def of_seed(cls, kind: Kind, seed: str) -> Self:
        """Read one. Raises CredentialsError."""
        try:
            data = base64.b32decode(seed + "=" * (-len(seed) % 8))
            key = cls(kind, Ed25519PrivateKey.from_private_bytes(data[2:-2]))
        except ValueError as error:
            raise CredentialsError("a seed is damaged") from error
        if key.seed != seed:
            raise CredentialsError(f"a seed is damaged, or of no {kind}")
        return key

    @property
    def seed(self) -> str:
        """The secret part."""
        head = bytes([_SEED | self._prefix >> 5, (self._prefix & 31) << 3])
        return _base32(head + self._private.private_bytes_raw())

    def sign(self, data: bytes) -> bytes:
        """Sign."""
        return self._private.sign(data)


class Credentials:
    """A file of credentials."""

    def __init__(self, path: Path) -> None:
        """Read the file. Raises CredentialsError."""
        self._path = path
        self._jwt, self._key = _read(path)

    @property
    def name(self) -> str:
        """The user's name: of a part, or of a pool's worker or workers."""
        return str(claims_of(self._jwt)["name"])

    def options(self) -> dict[str, Any]:
        """Return options of nats-py's ``connect``."""
        return {"signature_cb": self._sign, "user_jwt_cb": self._encoded_jwt}

    def _encoded_jwt(self) -> bytes:
        return self._jwt.encode()

    def _sign(self, nonce: str) -> bytes:
        # nats-py asks for this first, then for the JWT: both are of the same reading.
        self._jwt, self._key = _read(self._path)
        return base64.b64encode(self._key.sign(nonce.encode()))


def access_options(credentials: Path | None, ca_file: Path | None, role: str) -> dict[str, Any]:
    """Return options of nats-py's ``connect`` for a part of this role (``permissions``). Raises CredentialsError."""
    options: dict[str, Any] = {}
    if credentials is not None:
        options |= {"inbox_prefix": inbox_prefix(role), **Credentials(credentials).options()}
    if ca_file is not None:
        try:
            options["tls"] = ssl.create_default_context(cafile=ca_file)
        except OSError as error:
            raise CredentialsError(f"nats.ca_file: {ca_file}: {error}") from error
    return options


def encode_credentials(jwt: str, key: Key) -> str:
    """Return the content of a file of credentials."""
    return (
        f"-----BEGIN {_JWT}-----\n{jwt}\n------END {_JWT}------\n\n"
        f"-----BEGIN {_NKEY}-----\n{key.seed}\n------END {_NKEY}------\n"
    )


def claims_of(jwt: str) -> dict[str, Any]:
    """Return what a JWT says, unverified: that is the server's business. Raises CredentialsError."""
    try:
        part = jwt.split(".")[1]
        return dict(json.loads(base64.urlsafe_b64decode(part + "=" * (-len(part) % 4))))
    except (ValueError, IndexError, TypeError) as error:
        raise CredentialsError("a JWT is damaged") from error


def _read(path: Path) -> tuple[str, Key]:
    try:
        blocks = dict(_BLOCK.findall(path.read_text()))
        jwt, key = blocks[_JWT], Key.of_seed("user", blocks[_NKEY])
        claims_of(jwt)["name"]
    except (OSError, UnicodeDecodeError) as error:
        raise CredentialsError(f"{path}: {error}") from error
    except (KeyError, CredentialsError) as error:
        raise CredentialsError(f"{path}: no credentials of a NATS user: {error}") from error
    return jwt, key


def _base32(data: bytes) -> str:
    return base64.b32encode(data + _checksum(data)).rstrip(b"=").decode()


def _checksum(data: bytes) -> bytes:
    """Return the CRC-16 of XMODEM, little-endian."""
    return binascii.crc_hqx(data, 0).to_bytes(2, "little")
