"""Deadlines of the client, by its headers."""

from typing import Final

from gateway.errors import InvalidParameter
from gateway.http.exchange import Exchange

DEADLINE_HEADER: Final = "x-spillway-deadline-ms"  # from the whole request's arrival to the end of the answer
# How long official SDKs wait, in seconds: those for Python send the first, those for Node.js only the second.
READ_TIMEOUT_HEADER: Final = b"x-stainless-read-timeout"
TIMEOUT_HEADER: Final = b"x-stainless-timeout"
MAX_DEADLINE_DIGITS: Final = 12


def deadline_s(exchange: Exchange) -> float:
    """Return the client's deadline (monotonic clock; infinity: none). Raises InvalidParameter."""
    text = exchange.header_text(DEADLINE_HEADER.encode())
    if text is None:
        return float("inf")
    if not (text.isascii() and text.isdigit() and len(text) <= MAX_DEADLINE_DIGITS and int(text) > 0):
        allowed = f"a whole number of milliseconds, at least 1, of {MAX_DEADLINE_DIGITS} digits at most"
        raise InvalidParameter(f"'{DEADLINE_HEADER}' must be {allowed}.", param=DEADLINE_HEADER)
    return exchange.received_s + int(text) / 1000


def queue_wait_s(exchange: Exchange, deadline_s: float, limit_s: float) -> float:
    """Return how long the request may wait for a worker: until its deadline, or else as long as its SDK waits."""
    if deadline_s != float("inf"):
        return min(limit_s, deadline_s - exchange.received_s)
    headers = exchange.headers
    try:
        hint_s = float(headers.get(READ_TIMEOUT_HEADER) or headers.get(TIMEOUT_HEADER, b""))
    except ValueError:
        return limit_s
    return min(limit_s, hint_s) if hint_s > 0 else limit_s
