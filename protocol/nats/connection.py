"""nats-py's client, mended where it gives up, hangs, or takes a task where a call would do.

what happens                              nats-py                             here
the server answers -ERR (credentials      closes for ever                     reconnects for ever
being changed, too many connections)
the peer has vanished without a word,     waits until the kernel gives up     cuts the connection
with output unsent                        (some 15 minutes)
a reconnect meets an error it did not     stays disconnected in silence       says so and continues
foresee
a server it learnt of from another one    has no credentials for it           has those of the configured URLs
a server of a tls:// URL offers no TLS    goes on without                     does not
the limit of the first connect passes     may try for ever                    gives up
"""

import asyncio
import logging
from collections.abc import Callable
from typing import Any, Final
from urllib.parse import urlparse

from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription
from nats.aio.transport import TcpTransport
from nats.errors import Error as NatsError
from nats.protocol.parser import PERMISSIONS_ERR

AFTER_FAILURE_S: Final = 1.0
CANCEL_AGAIN_S: Final = 0.1

log = logging.getLogger(__name__)


class LastingClient(Client):
    """A client that, once connected, ends only by ``close``."""

    def __init__(self) -> None:
        super().__init__()
        self._handlers: dict[int, Callable[[Msg], None]] = {}  # of subscriptions that need no task, by number

    async def connect_within(self, limit_s: float, servers: list[str], **options: Any) -> None:  # noqa: ANN401  # theirs
        """Connect as ``connect`` does. Raises TimeoutError after the limit, and what ``connect`` raises."""
        connecting = asyncio.create_task(self.connect(servers, **options))
        try:
            await asyncio.wait({connecting}, timeout=limit_s)
        finally:
            # More than once: asyncio.wait_for of Python 3.11, by which nats-py waits for answers, loses a cancellation
            # that comes together with one (https://github.com/python/cpython/issues/86296).
            while not connecting.done():
                connecting.cancel()
                await asyncio.wait({connecting}, timeout=CANCEL_AGAIN_S)
        if connecting.cancelled():
            self.abort()
            raise TimeoutError
        connecting.result()

    def deliver_at_once(self, subscription: Subscription, handler: Callable[[Msg], None]) -> None:
        """Call ``handler`` with each message as it is read, where nats-py would put it into a queue for a task."""
        self._handlers[subscription._id] = handler  # noqa: SLF001

    async def _process_msg(self, sid: int, subject: bytes, reply: bytes, data: bytes, headers: bytes) -> None:
        handler = self._handlers.get(sid)
        if handler is None:
            await super()._process_msg(sid, subject, reply, data, headers)
            return
        parsed = await self._process_headers(headers) if headers else None
        try:
            handler(self._build_message(sid, subject, reply, data, parsed))
        except Exception as error:  # noqa: BLE001  # the connection reads on
            await self._error_cb(error)

    def abort(self) -> None:
        """Cut the connection without sending what is pending; nothing happens where there is none."""
        writer = self._transport._io_writer if isinstance(self._transport, TcpTransport) else None  # noqa: SLF001
        if writer is not None:
            writer.transport.abort()

    async def _process_err(self, err_msg: str) -> None:
        error = NatsError(f"the server says {err_msg}")
        await self._error_cb(error)
        if PERMISSIONS_ERR not in err_msg:  # that one forbids a subject, and the connection stays
            await self._process_op_err(error)

    async def _attempt_reconnect(self) -> None:
        self.abort()
        while not self.is_closed:
            try:
                await super()._attempt_reconnect()
            except Exception:
                log.exception("reconnecting to NATS failed in an unforeseen way; trying again")
                await asyncio.sleep(AFTER_FAILURE_S)
            else:
                return

    def _connect_command(self) -> bytes:
        """Make what is said first on a connection; with it goes who we are."""
        server = self._current_server
        if server is not None and server.uri.scheme == "tls" and not self._server_info.get("tls_required"):
            raise NatsError("the server offers no TLS")  # or somebody on the way has taken that out
        return super()._connect_command()

    async def _connect_to_server(self, s: Any) -> None:  # noqa: ANN401  # nats-py's own record of a server
        self.abort()  # what is left of a try that failed halfway
        await super()._connect_to_server(s)


def shared_credentials(servers: list[str]) -> dict[str, str]:
    """Return the credentials in the URLs, as options of nats-py's ``connect``; none if the URLs differ in them."""
    found = {(url.username, url.password) for url in map(urlparse, servers) if url.username}
    if len(found) != 1:
        return {}
    user, password = found.pop()
    return {"token": str(user)} if password is None else {"user": str(user), "password": password}
