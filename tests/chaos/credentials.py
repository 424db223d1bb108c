"""A queue server whose users have credentials, and the change of all of them."""

import time
from pathlib import Path

from protocol import subjects
from protocol.nats.access import PARTS, Key, access_options, encode_credentials, sign_claims
from spillway.nats_accounts import Authority, Pool, of_pool
from tests.shipped import ShippedNats


class SignedQueue:
    """The authority over the users of one queue server, with one pool."""

    def __init__(self, server: ShippedNats, folder: Path, pool: str) -> None:
        self.folder = folder
        self._server = server
        self._pools = {pool: Pool(models=(pool,), lanes=subjects.LANES)}
        self._parts = ("gateway", "ledger", of_pool(pool))
        self._authority = Authority.open(folder)
        for part in (*PARTS, of_pool(pool)):
            self._authority.issue(part)
        self._configure()

    def _configure(self) -> None:
        self._server.signed_accounts = self._authority.write_server_config(self._pools).read_text()

    def watcher_options(self) -> dict[str, object]:
        """Return the options of a connection that may do everything, which no part has."""
        key = Key.new("user")
        claims = {"type": "user", "subs": -1, "data": -1, "payload": -1}
        path = self.folder / "watcher.creds"
        account = self._authority._accounts["SPILLWAY"]
        path.write_text(encode_credentials(sign_claims(account, key.public, "watcher", claims, int(time.time())), key))
        return access_options(path, None, "watcher")

    def add(self) -> None:
        """Make a second credential for every part: files change, and nobody needs the new ones yet."""
        for part in self._parts:
            self._authority.issue(part)

    def retire(self) -> None:
        """Revoke all that were valid before; the server ends their connections."""
        for part in self._parts:
            self._authority.revoke(part, keep_newest=True)
        self._configure()
        self._server.reload(self._server.further_config)
