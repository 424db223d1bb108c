"""Runs coroutines that never wait, without an event loop: that is what a target costs."""

from collections.abc import AsyncIterator, Coroutine
from typing import Any, TypeVar

_Result = TypeVar("_Result")


def driven(coroutine: Coroutine[Any, Any, _Result]) -> _Result:
    """Return a coroutine's result."""
    try:
        coroutine.send(None)
    except StopIteration as end:
        result: _Result = end.value
        return result
    raise AssertionError("it waits")


def cut_bytes(payload: bytes) -> int:
    """Return the size of pieces into which a payload is cut: a dozen or so, however long it is."""
    return len(payload) // 13 + 3


async def pieces(payload: bytes, piece_bytes: int) -> AsyncIterator[bytes]:
    """Iterate over a payload as it may come."""
    for start in range(0, len(payload), piece_bytes):
        yield payload[start : start + piece_bytes]
