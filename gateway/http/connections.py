"""Limits of connections: how many there may be, and how long each may take."""

import logging
import resource
from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from gateway.errors import ApiError, Overloaded, TooManyConnections
from gateway.http.refusals import RefusalLog
from gateway.settings import ConnectionSettings
from protocol.nats.bus import Deadlines

if TYPE_CHECKING:
    from gateway.http.connection import Connection

OTHER_FILES: Final = 500  # that the process may have open beside connections: databases, exports, the queue

log = logging.getLogger(__name__)


def files_allow(wanted: int) -> int:
    """Raise the limit of open files and return how many connections it allows, ``wanted`` at most.

    Where it has no file left, a connection is closed without a word.
    """
    files = wanted + OTHER_FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= files:
        return wanted
    allowed = files if hard == resource.RLIM_INFINITY else min(files, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
    if allowed < files:
        log.warning("the system allows %d open files, so at most %d connections", allowed, allowed - OTHER_FILES)
    return max(1, allowed - OTHER_FILES)


class Connections:
    """All open connections of one gateway. Only the event loop touches it."""

    def __init__(
        self,
        settings: ConnectionSettings,
        refusals: RefusalLog,
        is_trusted: Callable[[str], bool],
    ) -> None:
        self.settings = settings
        self.refusals = refusals
        self.is_gateway_leaving = False  # then each connection ends with its next answer
        self.heads: Deadlines[Connection] = Deadlines(settings.head_s, lambda connection: connection.head_is_late())
        self.idle: Deadlines[Connection] = Deadlines(settings.keep_alive_s, lambda connection: connection.end_idle())
        self._is_trusted = is_trusted
        self._by_address: Counter[str] = Counter()
        self._total = 0
        self._max_total = files_allow(settings.max_total)

    def enter(self, address: str) -> ApiError | None:
        """Count a new connection in, or return the error for it where there is no room."""
        if self._total >= self._max_total and not self._end_longest_idle():
            return Overloaded("The gateway has no room for another connection at the moment.")
        if self._by_address[address] >= self.settings.max_per_address and not self._is_trusted(address):
            return TooManyConnections()
        self._by_address[address] += 1
        self._total += 1
        return None

    def leave(self, address: str) -> None:
        """Count out a connection that had been counted in."""
        self._total -= 1
        self._by_address[address] -= 1
        if not self._by_address[address]:
            del self._by_address[address]

    def _end_longest_idle(self) -> bool:
        connection = self.idle.first()
        if connection is None:
            return False
        connection.end_idle()
        return True
