"""ASGI types, and the gateway's own keys in a scope."""

from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any, Final

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]

ABORT_KEY: Final = "spillway.abort"  # aborts the connection
CYCLE_KEY: Final = "spillway.cycle"  # the Cycle, until an exchange takes it
EXCHANGE_KEY: Final = "spillway.exchange"  # the Exchange
HEADERS_KEY: Final = "spillway.headers"  # the headers by name
