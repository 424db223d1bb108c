"""Decodes events, joining characters that a server has split across two events.

JSON writes a character above U+FFFF as two escapes, a surrogate pair, and some servers split between them: one half in
one delta, the other in the next. A half without its counterpart becomes U+FFFD, as Unicode specifies.
"""

import json
from typing import Any, Final

import msgspec

from protocol.wire import UNDECODABLE

UNKNOWN: Final = "\N{REPLACEMENT CHARACTER}"
MAX_DEPTH: Final = 64  # per event with half a character

_decode = msgspec.json.Decoder(dict[str, Any]).decode
_Path = tuple[str | int, ...]
_FIRST = range(0xD800, 0xDC00)  # code points of the first halves, and of the second
_SECOND = range(0xDC00, 0xE000)


class EventDecoder:
    """Decodes the events of one answer."""

    def __init__(self) -> None:
        self._half: tuple[_Path, str] | None = None  # the first half at the end of a text, and the path to it

    def read(self, data: bytes) -> dict[str, Any]:
        """Decode one event. Raises one of UNDECODABLE."""
        try:
            event = _decode(data)
        except UNDECODABLE:
            if b"\\u" not in data:
                raise
            event = _with_halves(data)
        else:
            if self._half is None:
                return event
        half, self._half = self._half, None
        if half is not None and not _prepend(event, *half):
            self._half = half
        whole: dict[str, Any] = self._joined(event, ())
        return whole

    def _joined(self, value: Any, path: _Path) -> Any:  # noqa: ANN401  # any JSON
        if isinstance(value, str):
            if value and ord(value[-1]) in _FIRST and self._half is None:
                value, self._half = value[:-1], (path, value[-1])
            return value.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
        if len(path) > MAX_DEPTH:
            raise msgspec.DecodeError("the event is nested too deeply")
        if isinstance(value, dict):
            return {name: self._joined(one, (*path, name)) for name, one in value.items()}
        if isinstance(value, list):
            return [self._joined(one, (*path, place)) for place, one in enumerate(value)]
        return value


def _with_halves(data: bytes) -> dict[str, Any]:
    try:
        event = json.loads(data)
    except ValueError as error:
        raise msgspec.DecodeError(str(error)) from error
    if not isinstance(event, dict):
        raise msgspec.ValidationError("Expected `object`")
    return event


def _prepend(event: dict[str, Any], path: _Path, half: str) -> bool:
    """Put half a character before the text at ``path``, UNKNOWN if none follows; False if it may come later."""
    place: Any = event
    try:
        for step in path[:-1]:
            place = place[step]
    except (LookupError, TypeError):
        return False
    if not isinstance(place, dict):
        return False
    text = place.get(path[-1])
    if text == "":
        return False
    place[path[-1]] = half + text if isinstance(text, str) else UNKNOWN
    return True
