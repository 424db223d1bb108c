"""``[nats]`` of spillway.toml: the queue server, and how it is reached."""

import ipaddress
from pathlib import Path
from typing import Annotated
from urllib.parse import urlsplit

from pydantic import Field, SecretStr, model_validator

from gateway.settings import QueueSettings
from protocol import subjects
from protocol.nats.access import Credentials
from protocol.process import Settings


class NatsSection(Settings):
    """``[nats]``: the queue server. Without ``urls``, ``spillway up`` starts an embedded one."""

    urls: tuple[str, ...] = ()
    # A file of credentials, or a folder of them as `spillway nats credentials` makes it. None: what the URLs say.
    credentials: Path | None = None
    credentials_text: SecretStr | None = None  # what such a file holds: of a worker whose machine the fleet launched
    domain: Annotated[str, Field(pattern="^[A-Za-z0-9_-]+$")] | None = None  # of JetStream, through a leaf node
    ca_file: Path | None = None  # who vouches for the servers' certificates; None: the usual authorities
    allow_plaintext: bool = False  # to servers on other machines, over a network that is private
    embedded_port: Annotated[int, Field(ge=0, le=65535)] = 0  # 0: any free port
    queue: QueueSettings = QueueSettings()

    @model_validator(mode="after")
    def _others_must_not_read_along(self) -> "NatsSection":
        plain = [url for url in self.urls if not (_is_encrypted(url) or _is_on_this_machine(url))]
        if plain and not self.allow_plaintext:
            raise ValueError(
                f"urls: prompts would travel to {_host(plain[0])} unencrypted: use tls://, "
                "or set nats.allow_plaintext = true on a private network"
            )
        return self

    def credentials_of(self, part: str) -> Path | None:
        """Return the credentials of a part, or of a pool by its file's name; None if there are to be none."""
        if self.credentials is None or not self.credentials.is_dir():
            return self.credentials
        return self.credentials / f"{part}.creds"


def worker_id(process_id: str, pool: str, credentials: Path | SecretStr | None) -> str:
    """Return a worker's id; with credentials, it begins with what these allow it to be. Raises CredentialsError."""
    if credentials is None:
        return process_id
    return f"{subjects.worker_prefix(pool, Credentials(credentials).name)}.{process_id}"


def _is_encrypted(url: str) -> bool:
    return urlsplit(url).scheme in {"tls", "wss"}


def _is_on_this_machine(url: str) -> bool:
    try:
        return ipaddress.ip_address(_host(url)).is_loopback
    except ValueError:
        return _host(url) == "localhost"


def _host(url: str) -> str:
    return urlsplit(url if "//" in url else f"nats://{url}").hostname or ""
