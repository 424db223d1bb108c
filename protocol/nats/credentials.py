"""Credentials at the queue server: a user's JWT and the key that proves it, in a file of NATS' own kind (``.creds``).

The file is read for every connection: one that is replaced is in use from the next on, and the server ends a
connection when what it was made with expires or is revoked. So credentials change while everything runs.

Keys are NATS' "nkeys": Ed25519, in base32 with a letter for their kind and a checksum.
"""

import base64
import binascii
import hashlib
import json
import re
import ssl
import time
from pathlib import Path
from typing import Any, Final, Literal, Self

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from pydantic import BaseModel, SecretStr

from protocol.errors import BusError
from protocol.nats.permissions import inbox_prefix

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
    """Credentials in a file, or the content of one."""

    def __init__(self, source: Path | SecretStr) -> None:
        """Read them. Raises CredentialsError."""
        self._source = source
        self._jwt, self._key = _read(source)

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
        self._jwt, self._key = _read(self._source)
        return base64.b64encode(self._key.sign(nonce.encode()))


class WorkerKeys(BaseModel):
    """The keys that credentials of pools' workers are signed by: who holds them can make such workers, nothing else."""

    account: str  # of the workers, its public key
    signers: dict[str, str]  # by pool: a seed

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read the file. Raises CredentialsError."""
        try:
            return cls.model_validate_json(path.read_text())
        except (OSError, ValueError) as error:
            raise CredentialsError(f"{path}: {error}") from error

    def issue(self, pool: str, name: str, lasts_s: float) -> str:
        """Return credentials, as text, for the workers of one machine. Raises CredentialsError."""
        seed = self.signers.get(pool)
        if seed is None:
            raise CredentialsError(f"there is no key of the pool {pool}: run `spillway nats credentials`")
        return user_credentials(Key.of_seed("account", seed), self.account, Key.new("user"), name, lasts_s)


def access_options(credentials: Path | SecretStr | None, ca_file: Path | None, role: str) -> dict[str, Any]:
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


def user_credentials(signer: Key, account: str, user: Key, name: str, lasts_s: float | None = None) -> str:
    """Return the content of a file of credentials for a new user, whose permissions are those bound to the signer.

    ``account``: its public key. ``lasts_s``: None: they do not expire.
    """
    now_s = int(time.time())
    expires = {} if lasts_s is None else {"exp": now_s + int(lasts_s)}
    claims = {"type": "user", "issuer_account": account}
    return encode_credentials(sign_claims(signer, user.public, name, claims, now_s, **expires), user)


def sign_claims(by: Key, subject: str, name: str, nats: dict[str, Any], issued_s: int, **rest: int) -> str:
    """Return a JWT as NATS has them (version 2)."""
    claims = {"iat": issued_s, "iss": by.public, "name": name, "sub": subject, "nats": {**nats, "version": 2}, **rest}
    claims["jti"] = base64.b32encode(hashlib.sha256(json.dumps(claims).encode()).digest()).rstrip(b"=").decode()
    signed = f"{_part({'typ': 'JWT', 'alg': 'ed25519-nkey'})}.{_part(claims)}"
    return f"{signed}.{_base64(by.sign(signed.encode()))}"


def _part(content: dict[str, Any]) -> str:
    return _base64(json.dumps(content, separators=(",", ":")).encode())


def _base64(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()


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


def _read(source: Path | SecretStr) -> tuple[str, Key]:
    where = source if isinstance(source, Path) else "credentials_text"
    try:
        text = source.read_text() if isinstance(source, Path) else source.get_secret_value()
        blocks = dict(_BLOCK.findall(text))
        jwt, key = blocks[_JWT], Key.of_seed("user", blocks[_NKEY])
        claims_of(jwt)["name"]
    except (OSError, UnicodeDecodeError) as error:
        raise CredentialsError(f"{where}: {error}") from error
    except (KeyError, CredentialsError) as error:
        raise CredentialsError(f"{where}: no credentials of a NATS user: {error}") from error
    return jwt, key


def _base32(data: bytes) -> str:
    return base64.b32encode(data + _checksum(data)).rstrip(b"=").decode()


def _checksum(data: bytes) -> bytes:
    """Return the CRC-16 of XMODEM, little-endian."""
    return binascii.crc_hqx(data, 0).to_bytes(2, "little")
