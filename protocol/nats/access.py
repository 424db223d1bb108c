"""Permissions and credentials at the queue server."""

import base64
import binascii
import hashlib
import json
import re
import ssl
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final, Literal, Self

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from msgspec import Struct
from pydantic import BaseModel, SecretStr

from protocol import subjects
from protocol.errors import BusError
from protocol.nats.backup import COPIED_STREAMS
from protocol.nats.bus import API
from protocol.nats.objects import chunks_subject, stream_of
from protocol.nats.topology import QueueBounds, streams

# --- permissions ------------------------------------------------------------------------------------------------------
#
# The permissions of each part's user at the queue server: exactly the subjects that the part needs.
#
# gateway   streams and consumers, jobs, control of workers, limits, claims; messages between gateways
# ledger    consumes usage, payloads and webhook events; parked records; queries to gateways
# fleet     backlog, workers, drain commands, the leader's lease
# admin     commands of an operator: parked records, dead letters, limits, changes of keys, backups
# worker    jobs of its pool's models; frames, heartbeats and usage under its own id; its models' cards
#
# A worker may run on a third party's machine. Its permissions cover only its pool's jobs and its own id.
#
# Workers have a separate account, because permissions alone do not confine them. A client chooses the reply subject of
# a request to the server, and the server does not check permissions for replies: an empty reply to
# ``$JS.API.STREAM.DELETE.USAGE`` would delete the stream. In the workers' account, replies stay in the account, which
# has no streams, and only the subjects listed here cross into the other account.

# The prefix of JetStream API calls in the workers' account, which cross into the streams' account. It differs from
# $JS.API, which the server answers in each account itself.
WORKERS_API: Final = "js"
_CALLS: Final = (
    f"STREAM.INFO.{subjects.INTERACTIVE_STREAM}",
    f"CONSUMER.INFO.{subjects.INTERACTIVE_STREAM}.*",
    f"CONSUMER.MSG.NEXT.{subjects.INTERACTIVE_STREAM}.*",
    f"STREAM.MSG.GET.{stream_of(subjects.ARTIFACTS_BUCKET)}",
    f"STREAM.MSG.GET.{stream_of(subjects.PROMPTS_BUCKET)}",
)
# Subject in the streams' account → subject in the workers' account.
SERVICES_FOR_WORKERS: Final = {f"{API}.{call}": f"{WORKERS_API}.{call}" for call in _CALLS} | {
    subject: subject
    for subject in (
        f"$JS.ACK.{subjects.INTERACTIVE_STREAM}.>",
        f"{subjects.ATTEMPT_USAGE_SUBJECT}.>",
        subjects.OLDEST_JOBS,
        subjects.HEARTBEATS,
        subjects.kv_subject(subjects.MODELS_BUCKET, "*"),
        chunks_subject(subjects.ARTIFACTS_BUCKET, "*"),
        f"$O.{subjects.ARTIFACTS_BUCKET}.M.*",
    )
}
SENT_BY_WORKERS: Final = subjects.frames_subject(">")
SENT_TO_WORKERS: Final = subjects.control_subject(">")

PARTS: Final = ("gateway", "ledger", "fleet", "admin")
WORKER: Final = "worker"
_ANY: Final = "*"


class Permissions(Struct, frozen=True):
    """The permitted subjects of one part; all others are denied."""

    publish: tuple[str, ...]
    subscribe: tuple[str, ...]
    answers: bool = False  # whether it may reply once to each request


def inbox_prefix(role: str) -> str:
    """Return the prefix of the reply subjects of a part or a worker's credentials, which no other user may read."""
    return f"_INBOX.{role}"


def worker_role(prefix: str) -> str:
    """Return the role of the workers with this id prefix (``subjects.worker_prefix``)."""
    return f"{WORKER}.{prefix}"


def of_part(part: str) -> Permissions:
    """Return the permissions of one of ``PARTS``."""
    return {"gateway": _gateway, "ledger": _ledger, "fleet": _fleet, "admin": _admin}[part]()


def of_worker(
    pool: str, name: str, models: Iterable[str], lanes: Iterable[str], *, trusted: bool = False
) -> Permissions:
    """Return the permissions of the workers of a pool that use the credentials with this name.

    ``lanes``: those that the pool serves in each model's queue. They are enumerated, because a wildcard matches whole
    tokens. ``trusted``: the permissions are for trusted jobs only.
    """
    models = tuple(models)
    queues = [subjects.queue_of(model, trusted=trusted) for model in models]
    prefix = subjects.worker_prefix(pool, name)
    every = f"{prefix}.{_ANY}"
    consumers = [
        f"{subjects.INTERACTIVE_STREAM}.{subjects.job_consumer(queue, lane)}" for queue in queues for lane in lanes
    ]
    return Permissions(
        publish=(
            f"{WORKERS_API}.STREAM.INFO.{subjects.INTERACTIVE_STREAM}",
            *(f"{WORKERS_API}.CONSUMER.INFO.{consumer}" for consumer in consumers),
            *(f"{WORKERS_API}.CONSUMER.MSG.NEXT.{consumer}" for consumer in consumers),
            *(f"$JS.ACK.{consumer}.>" for consumer in consumers),
            *(subjects.oldest_job_subject(queue, _ANY) for queue in queues),
            subjects.frames_by_worker_subject(subjects.frames_subject(_ANY), every),
            subjects.heartbeat_subject(every),
            subjects.attempt_usage_subject(pool, every),
            *(subjects.model_card_subject(model) for model in models),
            *_object_subjects(subjects.ARTIFACTS_BUCKET),
            f"{WORKERS_API}.STREAM.MSG.GET.{stream_of(subjects.ARTIFACTS_BUCKET)}",
            f"{WORKERS_API}.STREAM.MSG.GET.{stream_of(subjects.PROMPTS_BUCKET)}",
        ),
        subscribe=(
            f"{inbox_prefix(worker_role(prefix))}.>",
            subjects.control_subject(every),
            subjects.HEARTBEATS,
            subjects.DISCONNECTS,
        ),
    )


def _gateway() -> Permissions:
    made = [config["name"] for config in streams(QueueBounds())]
    dead_letters = subjects.DEAD_LETTER_STREAM
    jobs, usage, payloads = subjects.INTERACTIVE_STREAM, subjects.USAGE_STREAM, subjects.PAYLOADS_STREAM
    responses = subjects.RESPONSES_STREAM
    artifacts, prompts = stream_of(subjects.ARTIFACTS_BUCKET), stream_of(subjects.PROMPTS_BUCKET)
    read = (
        subjects.MODELS_BUCKET,
        subjects.IDEMPOTENCY_BUCKET,
        subjects.QUOTAS_BUCKET,
        subjects.FLEET_BUCKET,
        subjects.BATCHES_BUCKET,
    )
    buckets = [f"KV_{name}" for name in read]
    talk = (subjects.KEYS_CHANGED_SUBJECT, subjects.LANES_IN_USE, subjects.QUOTA_WANTED)
    return Permissions(
        publish=(
            *(_api(f"STREAM.{call}", stream) for call in ("CREATE", "UPDATE", "INFO") for stream in made),
            *(_api(f"CONSUMER.{call}", f"{jobs}.{_ANY}") for call in ("DURABLE.CREATE", "DELETE")),
            _api("CONSUMER.DURABLE.CREATE", f"{usage}.{subjects.LEDGER_CONSUMER}"),
            _api("CONSUMER.DURABLE.CREATE", f"{payloads}.{subjects.PAYLOADS_CONSUMER}"),
            _api("CONSUMER.DURABLE.CREATE", f"{subjects.WEBHOOKS_STREAM}.{subjects.WEBHOOKS_CONSUMER}"),
            _api("CONSUMER.INFO", f"{usage}.{subjects.LEDGER_CONSUMER}"),
            *(
                _api("STREAM.MSG.GET", stream)
                for stream in (jobs, dead_letters, responses, artifacts, prompts, *buckets)
            ),
            *(_api("STREAM.MSG.DELETE", stream) for stream in (jobs, f"KV_{subjects.IDEMPOTENCY_BUCKET}")),
            *(_api("STREAM.PURGE", stream) for stream in (prompts, responses)),
            "rq.>",
            subjects.control_subject(">"),
            subjects.REQUEST_USAGE_SUBJECT,
            subjects.INTENT_USAGE_SUBJECT,
            subjects.PAYLOAD_SUBJECT,
            subjects.WEBHOOK_EVENT_SUBJECT,
            subjects.RESPONSE_SUBJECTS,
            subjects.runs_subject(_ANY),
            "dlq.*",
            subjects.kv_subject(subjects.IDEMPOTENCY_BUCKET, ">"),
            subjects.kv_subject(subjects.QUOTAS_BUCKET, ">"),
            subjects.kv_subject(subjects.BATCHES_BUCKET, ">"),
            *_object_subjects(subjects.PROMPTS_BUCKET),
            subjects.answers_subject(_ANY),
            subjects.BUDGET_REFUSED,
            subjects.LEDGER_WANTED,
            *talk,
        ),
        subscribe=(
            f"{inbox_prefix('gateway')}.>",
            subjects.frames_subject(">"),
            subjects.answers_subject(_ANY),
            subjects.open_requests_subject(_ANY),
            subjects.runs_subject(_ANY),
            subjects.RESPONSE_SUBJECTS,
            subjects.OLDEST_JOBS,
            subjects.HEARTBEATS,
            subjects.kv_subject(subjects.MODELS_BUCKET, _ANY),
            subjects.DISCONNECTS,
            subjects.WEBHOOKS_STATE,
            *talk,
        ),
        answers=True,
    )


def _ledger() -> Permissions:
    pulled = (
        f"{subjects.USAGE_STREAM}.{subjects.LEDGER_CONSUMER}",
        f"{subjects.PAYLOADS_STREAM}.{subjects.PAYLOADS_CONSUMER}",
        f"{subjects.WEBHOOKS_STREAM}.{subjects.WEBHOOKS_CONSUMER}",
    )
    return Permissions(
        publish=(
            *(_api(f"CONSUMER.{call}", consumer) for call in ("INFO", "MSG.NEXT") for consumer in pulled),
            *(f"$JS.ACK.{consumer}.>" for consumer in pulled),
            _api("STREAM.PURGE", subjects.USAGE_STREAM),
            _api("STREAM.INFO", f"KV_{subjects.QUOTAS_BUCKET}"),  # the server's time
            *_parked_records(),
            subjects.PARKED_USAGE_SUBJECT,
            subjects.open_requests_subject(_ANY),
            subjects.WEBHOOK_EVENT_SUBJECT,  # for budgets
            subjects.WEBHOOKS_STATE,
        ),
        subscribe=(
            f"{inbox_prefix('ledger')}.>",
            subjects.HEARTBEATS,
            subjects.BUDGET_REFUSED,
            subjects.LEDGER_WANTED,
        ),
    )


def _fleet() -> Permissions:
    buckets = (subjects.FLEET_BUCKET, subjects.MODELS_BUCKET)
    return Permissions(
        publish=(
            _api("STREAM.INFO", subjects.INTERACTIVE_STREAM),
            _api("STREAM.INFO", f"KV_{subjects.QUOTAS_BUCKET}"),  # the server's time
            *(_api("STREAM.MSG.GET", f"KV_{bucket}") for bucket in buckets),
            subjects.kv_subject(subjects.FLEET_BUCKET, ">"),
            subjects.control_subject(">"),  # to drain workers
        ),
        subscribe=(f"{inbox_prefix('fleet')}.>", subjects.HEARTBEATS),
    )


def _admin() -> Permissions:
    quotas = f"KV_{subjects.QUOTAS_BUCKET}"
    publish = (
        *(_api("STREAM.INFO", stream) for stream in (subjects.DEAD_LETTER_STREAM, quotas)),
        *(_api("STREAM.MSG.GET", stream) for stream in (subjects.DEAD_LETTER_STREAM, quotas)),
        *_parked_records(),
        *_copies(),
        _api("STREAM.INFO", subjects.INTERACTIVE_STREAM),  # this one and the next: for `spillway status`
        _api("CONSUMER.INFO", f"{subjects.USAGE_STREAM}.{subjects.LEDGER_CONSUMER}"),
        subjects.kv_subject(subjects.QUOTAS_BUCKET, ">"),
        subjects.KEYS_CHANGED_SUBJECT,
    )
    return Permissions(
        publish=tuple(dict.fromkeys(publish)), subscribe=(f"{inbox_prefix('admin')}.>", subjects.HEARTBEATS)
    )


def _parked_records() -> tuple[str, ...]:
    """Return the subjects for reading parked records, replaying them on their original subjects, and deleting them."""
    calls = ("INFO", "MSG.GET", "MSG.DELETE")
    return (*(_api(f"STREAM.{call}", subjects.PARKED_STREAM) for call in calls), "usage.>")


def _copies() -> tuple[str, ...]:
    """Return the subjects for copying streams and restoring missing ones."""
    calls = ("INFO", "SNAPSHOT", "RESTORE")
    return (
        *(_api(f"STREAM.{call}", stream) for call in calls for stream in COPIED_STREAMS),
        *(f"$JS.SNAPSHOT.{what}.{stream}.>" for what in ("ACK", "RESTORE") for stream in COPIED_STREAMS),
    )


def _object_subjects(bucket: str) -> tuple[str, str]:
    """Return the subjects for putting objects into a bucket: chunks and metadata."""
    return chunks_subject(bucket, "*"), f"$O.{bucket}.M.*"


def _api(call: str, what: str) -> str:
    return f"{API}.{call}.{what}"


# --- credentials ------------------------------------------------------------------------------------------------------
#
# Credentials at the queue server: a user's JWT and its private key, in a NATS ``.creds`` file.
#
# The file is read for every connection: a replaced file is used from the next connection on, and the server closes a
# connection when its credentials expire or are revoked. So credentials can be changed without a restart.
#
# Keys are NATS "nkeys": Ed25519 in base32, with a letter for their kind and a checksum.

Kind = Literal["operator", "account", "user"]

_PREFIXES: Final[dict[Kind, int]] = {"operator": 14 << 3, "account": 0, "user": 20 << 3}
_SEED: Final = 18 << 3
_BLOCK: Final = re.compile(r"-----BEGIN ([A-Z ]+)-----\s+(\S+)\s+-+END [A-Z ]+-+")
_JWT: Final = "NATS USER JWT"
_NKEY: Final = "USER NKEY SEED"


class CredentialsError(BusError):
    """Raised when the credentials for the queue server cannot be used; the message says why."""


class Key:
    """An nkey pair."""

    def __init__(self, kind: Kind, private: Ed25519PrivateKey) -> None:
        self._private = private
        self._prefix = _PREFIXES[kind]
        self.public = _base32(bytes([self._prefix]) + private.public_key().public_bytes_raw())

    @classmethod
    def new(cls, kind: Kind) -> Self:
        """Generate a key."""
        return cls(kind, Ed25519PrivateKey.generate())

    @classmethod
    def of_seed(cls, kind: Kind, seed: str) -> Self:
        """Read a key from its seed. Raises CredentialsError."""
        try:
            data = base64.b32decode(seed + "=" * (-len(seed) % 8))
            key = cls(kind, Ed25519PrivateKey.from_private_bytes(data[2:-2]))
        except ValueError as error:
            raise CredentialsError("the seed is damaged") from error
        if key.seed != seed:
            raise CredentialsError(f"the seed is damaged, or belongs to another kind of key than {kind}")
        return key

    @property
    def seed(self) -> str:
        """The private part, encoded."""
        head = bytes([_SEED | self._prefix >> 5, (self._prefix & 31) << 3])
        return _base32(head + self._private.private_bytes_raw())

    def sign(self, data: bytes) -> bytes:
        return self._private.sign(data)


class Credentials:
    """Credentials in a file, or the content of one."""

    def __init__(self, source: Path | SecretStr) -> None:
        """Read the credentials. Raises CredentialsError."""
        self._source = source
        self._jwt, self._key = _read(source)

    @property
    def name(self) -> str:
        """The user's name: that of a part, or of a pool's worker or workers."""
        return str(claims_of(self._jwt)["name"])

    def options(self) -> dict[str, Any]:
        """Return options of nats-py's ``connect``."""
        return {"signature_cb": self._sign, "user_jwt_cb": self._encoded_jwt}

    def _encoded_jwt(self) -> bytes:
        return self._jwt.encode()

    def _sign(self, nonce: str) -> bytes:
        # nats-py calls this first, then asks for the JWT: both come from the same read.
        self._jwt, self._key = _read(self._source)
        return base64.b64encode(self._key.sign(nonce.encode()))


class WorkerKeys(BaseModel):
    """The signing keys for credentials of pools' workers. They can only create users with a worker's permissions."""

    account: str  # public key of the workers' account
    signers: dict[str, str]  # seeds by pool

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read the file. Raises CredentialsError."""
        try:
            return cls.model_validate_json(path.read_text())
        except (OSError, ValueError) as error:
            raise CredentialsError(f"{path}: {error}") from error

    def issue(self, pool: str, name: str, lasts_s: float) -> str:
        """Return the content of a credentials file for the workers of one machine. Raises CredentialsError."""
        seed = self.signers.get(pool)
        if seed is None:
            raise CredentialsError(f"no signing key for the pool {pool}: run `spillway nats credentials`")
        return user_credentials(Key.of_seed("account", seed), self.account, Key.new("user"), name, lasts_s)


def access_options(credentials: Path | SecretStr | None, ca_file: Path | None, role: str) -> dict[str, Any]:
    """Return options of nats-py's ``connect`` for a part of this role. Raises CredentialsError."""
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
    """Return the content of a credentials file for a new user with the permissions bound to the signer.

    ``account``: its public key. ``lasts_s``: None: they do not expire.
    """
    now_s = int(time.time())
    expires = {} if lasts_s is None else {"exp": now_s + int(lasts_s)}
    claims = {"type": "user", "issuer_account": account}
    return encode_credentials(sign_claims(signer, user.public, name, claims, now_s, **expires), user)


def sign_claims(by: Key, subject: str, name: str, nats: dict[str, Any], issued_s: int, **rest: int) -> str:
    """Return a NATS JWT (version 2)."""
    claims = {"iat": issued_s, "iss": by.public, "name": name, "sub": subject, "nats": {**nats, "version": 2}, **rest}
    claims["jti"] = base64.b32encode(hashlib.sha256(json.dumps(claims).encode()).digest()).rstrip(b"=").decode()
    signed = f"{_part({'typ': 'JWT', 'alg': 'ed25519-nkey'})}.{_part(claims)}"
    return f"{signed}.{_base64(by.sign(signed.encode()))}"


def _part(content: dict[str, Any]) -> str:
    return _base64(json.dumps(content, separators=(",", ":")).encode())


def _base64(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()


def encode_credentials(jwt: str, key: Key) -> str:
    """Return the content of a credentials file."""
    return (
        f"-----BEGIN {_JWT}-----\n{jwt}\n------END {_JWT}------\n\n"
        f"-----BEGIN {_NKEY}-----\n{key.seed}\n------END {_NKEY}------\n"
    )


def claims_of(jwt: str) -> dict[str, Any]:
    """Return the claims of a JWT without verifying it; the server does. Raises CredentialsError."""
    try:
        part = jwt.split(".")[1]
        return dict(json.loads(base64.urlsafe_b64decode(part + "=" * (-len(part) % 4))))
    except (ValueError, IndexError, TypeError) as error:
        raise CredentialsError("the JWT is damaged") from error


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
        raise CredentialsError(f"{where}: not the credentials of a NATS user: {error}") from error
    return jwt, key


def _base32(data: bytes) -> str:
    return base64.b32encode(data + _checksum(data)).rstrip(b"=").decode()


def _checksum(data: bytes) -> bytes:
    """Return the CRC-16 of XMODEM, little-endian."""
    return binascii.crc_hqx(data, 0).to_bytes(2, "little")
