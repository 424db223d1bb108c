"""How often somebody may try a password."""

import ipaddress
import time
from collections import OrderedDict, deque
from typing import Final

from gateway.auth.errors import TooManyLogins

WINDOW_S: Final = 60.0
MAX_FAILURES: Final = 5  # in a window, from one address
MAX_ADDRESSES: Final = 10_000  # remembered; past it, the one that failed longest ago is forgotten
IPV6_NETWORK_BITS: Final = 64  # what one caller gets: he can choose any address in it


class LoginThrottle:
    """Counts wrong passwords by address, in this gateway."""

    def __init__(self) -> None:
        self._failures: OrderedDict[str, deque[float]] = OrderedDict()

    def check(self, address: str) -> None:
        """Return if one more try is allowed. Raises TooManyLogins."""
        failures = self._failures.get(_caller_of(address), ())
        now_s = time.monotonic()
        if sum(now_s - failed_s < WINDOW_S for failed_s in failures) >= MAX_FAILURES:
            raise TooManyLogins("Too many wrong passwords: try again in a minute.")

    def failed(self, address: str) -> None:
        """Count a try as wrong. Count it before the password is checked, and take it back by ``succeeded``."""
        caller = _caller_of(address)
        self._failures.setdefault(caller, deque(maxlen=MAX_FAILURES)).append(time.monotonic())
        self._failures.move_to_end(caller)
        while len(self._failures) > MAX_ADDRESSES:
            self._failures.popitem(last=False)

    def succeeded(self, address: str) -> None:
        """Forget the failures of an address."""
        self._failures.pop(_caller_of(address), None)


def _caller_of(address: str) -> str:
    try:
        parsed = ipaddress.ip_address(address)
    except ValueError:
        return address
    if parsed.version == 4:
        return address
    return str(ipaddress.ip_network((parsed, IPV6_NETWORK_BITS), strict=False))
