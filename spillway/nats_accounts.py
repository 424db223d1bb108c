"""The authority over the queue server's users: it signs accounts, credentials and revocations.

    operator ──signs──> account SPILLWAY: streams; users gateway, ledger, fleet, admin
             ──signs──> account WORKERS:  no streams; protocol.nats.access lists what the two accounts exchange
             ──signs──> account SYS:      reports when a worker's connection has ended

Servers get the accounts (``nats-accounts.conf``), which hold no secrets. Each part and each pool has its own signing
key in its account. The signing key determines the permissions of the users that it signs. A user's JWT is therefore
short, can be created without contacting the server, and can expire. The holder of one pool's key can create workers of
this pool and nothing else. Servers need a reload only after a change of permissions or a revocation.
"""

import os
import re
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Self

from pydantic import BaseModel

from protocol import subjects
from protocol.errors import ExpectedError
from protocol.nats import access
from protocol.nats.access import Key, Permissions, WorkerKeys, sign_claims, user_credentials

KEYS_NAME: Final = "keys.json"
SERVER_CONFIG_NAME: Final = "nats-accounts.conf"
WORKER_KEYS_NAME: Final = "worker-keys.json"
SHARED_NAME: Final = "pool"  # of the credentials that all workers of a pool may share
ANSWER_WITHIN_S: Final = 10
# After this time the server drops answers to a pull. Must exceed the wait of a pull in pool_worker.consumer.
PULL_ANSWERS_WITHIN_S: Final = 30
NAME_PATTERN: Final = r"^[A-Za-z0-9_-]{1,64}$"
_NS: Final = 1_000_000_000
_UNLIMITED: Final = {"subs": -1, "data": -1, "payload": -1}
_ACCOUNT_LIMITS: Final = {**_UNLIMITED, "imports": -1, "exports": -1, "wildcards": True, "conn": -1, "leaf": -1}
_STREAM_LIMITS: Final = {"mem_storage": -1, "disk_storage": -1, "streams": -1, "consumer": -1}
_ACCOUNTS: Final = ("SYS", "SPILLWAY", "WORKERS")


class AuthorityError(ExpectedError):
    """Credentials cannot be created; the message says why."""


class Pool(BaseModel):
    """The settings of a pool that determine its workers' permissions."""

    models: tuple[str, ...]
    lanes: tuple[str, ...]
    trusted: bool = False


class User(BaseModel):
    """One user of the queue server."""

    file: str  # of its credentials, without ".creds"
    public: str
    issued_unix_s: int
    expires_unix_s: int | None = None
    revoked_unix_s: int | None = None


class _State(BaseModel):
    """The content of ``keys.json``."""

    created_unix_s: int
    operator: str  # seed
    accounts: dict[str, str]  # seeds by account name
    signers: dict[str, str] = {}  # seeds by file name without the machine's name
    users: list[User] = []


class Authority:
    """The keys in one folder, which only the operator of the installation may read."""

    def __init__(self, folder: Path, state: _State) -> None:
        self._folder = folder
        self._state = state
        self._operator = Key.of_seed("operator", state.operator)
        self._accounts = {name: Key.of_seed("account", seed) for name, seed in state.accounts.items()}

    @classmethod
    def open(cls, folder: Path) -> Self:
        """Read the keys, or create them the first time. Raises AuthorityError."""
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            path = folder / KEYS_NAME
            if path.exists():
                return cls(folder, _State.model_validate_json(path.read_text()))
        except (OSError, ValueError) as error:
            raise AuthorityError(f"{folder}: {error}") from error
        created = _State(
            created_unix_s=int(time.time()),
            operator=Key.new("operator").seed,
            accounts={name: Key.new("account").seed for name in _ACCOUNTS},
        )
        return cls(folder, created)

    @property
    def users(self) -> Sequence[User]:
        """All users that have not expired, oldest first."""
        return [user for user in self._state.users if not _is_expired(user)]

    def issue(self, part: str, name: str | None = None, *, lasts_s: float | None = None) -> Path:
        """Create a user of a part or a pool, and write its credentials. Others of the same name stay valid.

        ``part``: one of ``access.PARTS``, or ``of_pool(...)``. ``name``: a machine of the pool. Raises AuthorityError.
        """
        if name is not None and part not in self._state.signers:
            raise AuthorityError(f"{part}: no signing key for this pool yet. Run `spillway nats credentials` first")
        file = part if name is None else f"{part}.{name}"
        key = Key.new("user")
        expires_s = None if lasts_s is None else int(time.time() + lasts_s)
        user = User(file=file, public=key.public, issued_unix_s=int(time.time()), expires_unix_s=expires_s)
        is_part = part in access.PARTS
        account = self._accounts["SPILLWAY" if is_part else "WORKERS"]
        named = part if is_part else (name or SHARED_NAME)
        text = user_credentials(self._signer(part), account.public, key, named, lasts_s)
        self._state.users.append(user)
        path = self._folder / f"{file}.creds"
        self._write(path, text)
        self._save()
        return path

    def revoke(self, file: str, *, keep_newest: bool) -> int:
        """Revoke all users of these credentials, or all but the newest; return how many.

        Takes effect when servers reload their configuration. Raises AuthorityError if no user has this name.
        """
        found = [user for user in self.users if user.file == file]
        if not found:
            raise AuthorityError(f"{file!r}: no valid credentials with this name")
        revoked = [user for user in found[: -1 if keep_newest else None] if user.revoked_unix_s is None]
        for user in revoked:
            user.revoked_unix_s = int(time.time())
        if not keep_newest:
            (self._folder / f"{file}.creds").unlink(missing_ok=True)
        self._save()
        return len(revoked)

    def write_server_config(self, pools: Mapping[str, Pool]) -> Path:
        """Write the servers' configuration: accounts, permissions and revocations. Servers include and reload it."""
        created_s = self._state.created_unix_s  # constant, because running servers reject a changed operator JWT
        system = self._accounts["SYS"].public
        operator = {"type": "operator", "system_account": system}
        jwts = {
            "SYS": self._account("SYS", _SYSTEM, created_s),
            "SPILLWAY": self._account("SPILLWAY", self._of_streams(), int(time.time())),
            "WORKERS": self._account("WORKERS", self._of_workers(pools), int(time.time())),
        }
        preloaded = "".join(f'  {self._accounts[name].public}: "{jwt}"\n' for name, jwt in jwts.items())
        path = self._folder / SERVER_CONFIG_NAME
        path.write_text(
            "# Generated by `spillway nats`. Contains no secrets. Include it in nats-server's configuration, and\n"
            "# reload the server after each change: SIGHUP, or nats-server --signal reload.\n"
            f'operator: "{sign_claims(self._operator, self._operator.public, "spillway", operator, created_s)}"\n'
            f"system_account: {system}\n"
            f"resolver: MEMORY\nresolver_preload {{\n{preloaded}}}\n"
        )
        self._save()
        return path

    def write_worker_keys(self, pools: Iterable[str]) -> Path:
        """Write the keys with which a fleet controller creates the credentials of these pools' workers only."""
        path = self._folder / WORKER_KEYS_NAME
        signers = {pool: self._signer(of_pool(pool)).seed for pool in pools}
        self._write(
            path, WorkerKeys(account=self._accounts["WORKERS"].public, signers=signers).model_dump_json(indent=1)
        )
        return path

    def account_id(self, name: str = "SPILLWAY") -> str:
        """Return the public key of an account. For SPILLWAY, it is also the name of its folder in JetStream's store."""
        return self._accounts[name].public

    # --- accounts -----------------------------------------------------------------------------------------------------

    def _account(self, name: str, rest: dict[str, Any], issued_s: int) -> str:
        claims = {"type": "account", "limits": _ACCOUNT_LIMITS, **rest}
        return sign_claims(self._operator, self._accounts[name].public, name, claims, issued_s)

    def _of_streams(self) -> dict[str, Any]:
        scopes = {part: access.of_part(part) for part in access.PARTS}
        return {
            "limits": _ACCOUNT_LIMITS | _STREAM_LIMITS,
            "signing_keys": [self._scope(part, scope) for part, scope in scopes.items()],
            "revocations": self._revocations(),
            "exports": [_service(subject) for subject in access.SERVICES_FOR_WORKERS]
            + [_stream(access.SENT_TO_WORKERS)],
            "imports": [_imported(_stream(access.SENT_BY_WORKERS), self._accounts["WORKERS"]), self._ends()],
        }

    def _of_workers(self, pools: Mapping[str, Pool]) -> dict[str, Any]:
        scopes = {
            of_pool(name): access.of_worker(name, "{{name()}}", pool.models, pool.lanes, trusted=pool.trusted)
            for name, pool in pools.items()
        }
        asked = self._accounts["SPILLWAY"]
        return {
            "signing_keys": [self._scope(part, scope) for part, scope in scopes.items()],
            "revocations": self._revocations(),
            "exports": [_stream(access.SENT_BY_WORKERS)],
            "imports": [
                *(
                    {
                        **_imported({"name": subject, "subject": subject, "type": "service"}, asked),
                        "local_subject": here,
                    }
                    for subject, here in access.SERVICES_FOR_WORKERS.items()
                ),
                _imported(_stream(access.SENT_TO_WORKERS), asked),
                self._ends(),
            ],
        }

    def _ends(self) -> dict[str, Any]:
        """Return the import of the events that report the end of a worker's connection."""
        subject = subjects.DISCONNECTS.replace("*", self._accounts["WORKERS"].public)
        return _imported(_stream(subject), self._accounts["SYS"])

    def _scope(self, part: str, allowed: Permissions) -> dict[str, Any]:
        answers = {"resp": {"max": 1, "ttl": ANSWER_WITHIN_S * _NS}} if allowed.answers else {}
        template = {
            "pub": {"allow": list(allowed.publish)},
            "sub": {"allow": list(allowed.subscribe)},
            **answers,
            **_UNLIMITED,
        }
        return {"kind": "user_scope", "key": self._signer(part).public, "role": part, "template": template}

    def _signer(self, part: str) -> Key:
        seed = self._state.signers.setdefault(part, Key.new("account").seed)
        return Key.of_seed("account", seed)

    def _revocations(self) -> dict[str, int]:
        return {user.public: user.revoked_unix_s for user in self.users if user.revoked_unix_s is not None}

    # --- files --------------------------------------------------------------------------------------------------------

    def _save(self) -> None:
        self._state.users = list(self.users)
        self._write(self._folder / KEYS_NAME, self._state.model_dump_json(indent=1))

    @staticmethod
    def _write(path: Path, text: str) -> None:
        """Write a file that only we may read, in place of what is there, at once: a process may be reading it."""
        draft = path.with_name(f".{path.name}.draft")
        try:
            draft.unlink(missing_ok=True)
            with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
                file.write(text)
            draft.replace(path)
        except OSError as error:
            raise AuthorityError(f"{path}: {error.strerror}") from error


_SYSTEM: Final = {"exports": [{"name": "ends", "subject": subjects.DISCONNECTS, "type": "stream"}]}


def of_pool(name: str) -> str:
    """Return how a pool's key and the files of its credentials are called."""
    return f"pool-{subjects.escape(name)}"


def check_name(name: str) -> str:
    """Return the name of a machine's credentials, which is a subject token. Raises AuthorityError."""
    if not re.match(NAME_PATTERN, name):
        raise AuthorityError(f"{name!r}: a name has up to 64 letters, digits, - and _")
    return name


def _is_expired(user: User) -> bool:
    return user.expires_unix_s is not None and user.expires_unix_s < time.time()


def _service(subject: str) -> dict[str, Any]:
    is_pull = subject.startswith("$JS.API.CONSUMER.MSG.NEXT")
    return {
        "name": subject,
        "subject": subject,
        "type": "service",
        **({"response_type": "Stream", "response_threshold": PULL_ANSWERS_WITHIN_S * _NS} if is_pull else {}),
    }


def _stream(subject: str) -> dict[str, Any]:
    return {"name": subject, "subject": subject, "type": "stream"}


def _imported(exported: dict[str, Any], account: Key) -> dict[str, Any]:
    return {**exported, "account": account.public}
