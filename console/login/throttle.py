"""How often somebody may try a password.

who                                          may fail so often a minute
a browser that this person has logged in by  5: whatever strangers do, it is let in
one address, at one name                     5: so a stranger elsewhere takes no place of anybody's
one address                                  20
all strangers together                       120: what their passwords may cost in hashing, some 0.1 s of a core each

Only the last line lets strangers keep somebody out, for as long as they go on from many addresses, and only from a
browser that is new to us.
"""

import ipaddress
import time
from collections import OrderedDict, deque
from typing import Final

from accounts.errors import TooManyLogins

WINDOW_S: Final = 60.0
MAX_PER_BROWSER: Final = 5
MAX_PER_NAME: Final = 5
MAX_PER_ADDRESS: Final = 20
MAX_UNKNOWN: Final = 120
MAX_REMEMBERED: Final = 10_000  # browsers, addresses and names; past it, who failed longest ago is forgotten
IPV6_NETWORK_BITS: Final = 64  # what one caller gets: he can choose any address in it

_UNKNOWN: Final = ("strangers",)


class LoginThrottle:
    """Counts wrong passwords, in this gateway."""

    def __init__(self) -> None:
        self._failures: OrderedDict[tuple[str, ...], deque[float]] = OrderedDict()

    def begin(self, name: str, address: str, browser: str | None) -> str | None:
        """Count a try as wrong before its password is looked at; ``succeeded`` takes it back. Raises TooManyLogins.

        ``browser``: by which this person has logged in before; None: not known. Returns it, unless it has failed so
        often that it counts as a stranger.
        """
        now_s = time.monotonic()
        if browser is not None and self._has_capacity(("browser", browser), MAX_PER_BROWSER, now_s):
            self._count(("browser", browser), MAX_PER_BROWSER, now_s)
            return browser
        limits = _counters(name, address)
        if not all(self._has_capacity(who, most, now_s) for who, most in limits.items()):
            raise TooManyLogins("Too many wrong passwords: try again in a minute.")
        for who, most in limits.items():
            self._count(who, most, now_s)
        return None

    def succeeded(self, name: str, address: str, browser: str | None) -> None:
        """The try was no failure, and the person's earlier ones are forgotten; ``browser``: what ``begin`` returned."""
        if browser is not None:
            self._failures.pop(("browser", browser), None)
            return
        for who in _counters(name, address):
            if who[0] == "name":
                self._failures.pop(who, None)
            elif failures := self._failures.get(who):
                failures.pop()

    def _has_capacity(self, who: tuple[str, ...], most: int, now_s: float) -> bool:
        return sum(now_s - failed_s < WINDOW_S for failed_s in self._failures.get(who, ())) < most

    def _count(self, who: tuple[str, ...], most: int, now_s: float) -> None:
        self._failures.setdefault(who, deque(maxlen=most)).append(now_s)
        self._failures.move_to_end(who)
        while len(self._failures) > MAX_REMEMBERED:
            self._failures.popitem(last=False)


def _counters(name: str, address: str) -> dict[tuple[str, ...], int]:
    caller = _client_network(address)
    return {
        ("name", caller, name): MAX_PER_NAME,
        ("address", caller): MAX_PER_ADDRESS,
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
