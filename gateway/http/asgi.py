"""ASGI's types, and what this gateway puts into a scope beside ASGI's own keys."""

from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any, Final

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]

ABORT_KEY: Final = "spillway.abort"  # breaks the connection off
CYCLE_KEY: Final = "spillway.cycle"  # until it is an exchange's: the Cycle
EXCHANGE_KEY: Final = "spillway.exchange"  # the Exchange
HEADERS_KEY: Final = "spillway.headers"  # the headers by name
