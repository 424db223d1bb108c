"""``[nats]`` of spillway.toml: the queue server and its connection."""

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
    # A file of credentials, or the folder that `spillway nats credentials` writes. None: user and password of the URLs.
    credentials: Path | None = None
    credentials_text: SecretStr | None = None  # content of a credentials file; set on machines that the fleet launches
    domain: Annotated[str, Field(pattern="^[A-Za-z0-9_-]+$")] | None = None  # JetStream domain, behind a leaf node
    ca_file: Path | None = None  # CA of the servers' certificates. None: the system's CAs
    allow_plaintext: bool = False  # allow unencrypted connections to other machines, on a private network
    embedded_port: Annotated[int, Field(ge=0, le=65535)] = 0  # 0: any free port
    queue: QueueSettings = QueueSettings()

    @model_validator(mode="after")
    def _remote_urls_must_be_encrypted(self) -> "NatsSection":
        plain = [url for url in self.urls if not (_is_encrypted(url) or _is_on_this_machine(url))]
        if plain and not self.allow_plaintext:
            raise ValueError(
                f"urls: the connection to {_host(plain[0])} would be unencrypted. Use tls://, or set "
                "nats.allow_plaintext = true on a private network"
            )
        return self

    def credentials_of(self, part: str) -> Path | None:
        """Return the path of a part's credentials, or of a pool's by its file name; None if none are configured."""
        if self.credentials is None or not self.credentials.is_dir():
            return self.credentials
        return self.credentials / f"{part}.creds"


def worker_id(process_id: str, pool: str, credentials: Path | SecretStr | None) -> str:
    """Return a worker's id. With credentials, it starts with the prefix that they permit. Raises CredentialsError."""
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
