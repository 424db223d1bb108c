"""Limits on failed logins.

source                                     failures per minute
a browser that the user has logged in by   5: independent of all other clients
one address, for one user name             5: clients at other addresses do not use up this limit
one address                                20
all unknown browsers together              120: bounds the cost of hashing, about 0.1 s of a core per password

Only the last limit lets attackers lock out a user, while they keep trying from many addresses, and only in a browser
that is unknown here.
"""

import ipaddress
import time
from collections import OrderedDict, deque
from typing import Final

from db.accounts.errors import TooManyLogins

WINDOW_S: Final = 60.0
MAX_PER_BROWSER: Final = 5
MAX_PER_NAME: Final = 5
MAX_PER_ADDRESS: Final = 20
MAX_UNKNOWN: Final = 120
MAX_REMEMBERED: Final = 10_000  # browsers, addresses and names; past it, the one that failed longest ago is dropped
IPV6_NETWORK_BITS: Final = 64  # assigned to one client, who can use any address in it

_UNKNOWN: Final = ("unknown browsers",)


class LoginThrottle:
    """Counts wrong passwords in this gateway."""

    def __init__(self, max_remembered: int = MAX_REMEMBERED) -> None:
        self._max_remembered = max_remembered
        self._failures: OrderedDict[tuple[str, ...], deque[float]] = OrderedDict()

    def begin(self, name: str, address: str, browser: str | None) -> str | None:
        """Count a login as failed before its password is checked; ``succeeded`` undoes this. Raises TooManyLogins.

        ``browser``: one that this user has logged in by before; None: unknown. Returns it, unless it has failed so
        often that it counts as unknown.
        """
        now_s = time.monotonic()
        if browser is not None and self._has_capacity(("browser", browser), MAX_PER_BROWSER, now_s):
            self._count(("browser", browser), MAX_PER_BROWSER, now_s)
            return browser
        limits = _limits(name, address)
        if not all(self._has_capacity(source, limit, now_s) for source, limit in limits.items()):
            raise TooManyLogins("Too many wrong passwords. Try again in a minute.")
        for source, limit in limits.items():
            self._count(source, limit, now_s)
        return None

    def succeeded(self, name: str, address: str, browser: str | None) -> None:
        """Undo ``begin`` and reset the user's earlier failures; ``browser``: the return value of ``begin``."""
        if browser is not None:
            self._failures.pop(("browser", browser), None)
            return
        for source in _limits(name, address):
            if source[0] == "name":
                self._failures.pop(source, None)
            elif failures := self._failures.get(source):
                failures.pop()

    def _has_capacity(self, source: tuple[str, ...], limit: int, now_s: float) -> bool:
        return sum(now_s - failed_s < WINDOW_S for failed_s in self._failures.get(source, ())) < limit

    def _count(self, source: tuple[str, ...], limit: int, now_s: float) -> None:
        self._failures.setdefault(source, deque(maxlen=limit)).append(now_s)
        self._failures.move_to_end(source)
        while len(self._failures) > self._max_remembered:
            self._failures.popitem(last=False)


def _limits(name: str, address: str) -> dict[tuple[str, ...], int]:
    network = _client_network(address)
    return {
        ("name", network, name): MAX_PER_NAME,
        ("address", network): MAX_PER_ADDRESS,
        _UNKNOWN: MAX_UNKNOWN,
    }


def _client_network(address: str) -> str:
    try:
        parsed = ipaddress.ip_address(address)
    except ValueError:
        return address
    if parsed.version == 4:
        return address
    return str(ipaddress.ip_network((parsed, IPV6_NETWORK_BITS), strict=False))
