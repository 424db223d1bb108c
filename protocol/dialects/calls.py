"""One call as a JSON object, ``{"name": …, "arguments": {…}}``, as most families write it between their marks."""

import json
from collections.abc import Collection
from typing import Any, Final

from protocol.dialects.source import MAX_HELD_CHARS, Kind, Reading, Source

ARGUMENT_KEYS: Final = frozenset({"arguments", "parameters"})
NO_ARGUMENTS: Final = "{}"
HELD_TEXT: Final = "arguments"  # the key under which invalid arguments are kept as text


def arguments_of(text: str) -> dict[str, Any] | None:
    """Return the arguments of a call; None if the text is not a JSON object, for example if it was cut off."""
    try:
        found = json.loads(text.strip() or NO_ARGUMENTS, parse_constant=_refuse)
        if "\\ud" in text.lower():  # half of a surrogate pair is not a character
            json.dumps(found, ensure_ascii=False).encode()
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def is_cut(arguments: str) -> bool:
    """Return whether a call was cut off within its arguments."""
    try:
        json.loads(arguments or NO_ARGUMENTS)
    except (ValueError, RecursionError):
        return True
    return False


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")


def read_call(source: Source, names: Collection[str] | None = None) -> Reading[bool]:
    """Read one call and the space after it; return False, having emitted nothing and peeked at the text, if none.

    The call is emitted once its name is known and its arguments begin; from then on the model's text counts as the
    arguments, valid or not, as with OpenAI. ``names``: the valid names of calls, if restricted.
    """
    if (yield from source.peek()) != "{":
        return False
    call = _Call(names)
    separator = ","
    while separator == "," and source.at < MAX_HELD_CHARS:
        source.at += 1  # the opening brace, or the comma
        if not (yield from call.read_member(source)):
            break
        separator = yield from source.peek()
    if not call.is_reported and (separator != "}" or not call.name):
        return False
    call.emit_rest(source)
    if separator == "}":
        source.at += 1
    yield from source.skip_space()
    return True


class _Call:
    """The state of a call that is being read."""

    def __init__(self, names: Collection[str] | None) -> None:
        self.name = ""
        self.is_reported = False
        self._names = names
        self._arguments = NO_ARGUMENTS  # if they precede the name

    def read_member(self, source: Source) -> Reading[bool]:
        """Read a key and its value; return False if this is not a call, or the text ends."""
        key = _text_of((yield from source.value()))
        if key is None or (yield from source.peek()) != ":":
            return False
        source.at += 1
        if key in ARGUMENT_KEYS and self.name and not self.is_reported:
            self.is_reported = True
            source.emit(Kind.CALL, self.name)
            yield from pass_arguments(source)
            return True
        value = yield from source.value()
        if key == "name":
            self.name = _text_of(value) or ""
            return bool(self.name) and (self._names is None or self.name in self._names)
        if key in ARGUMENT_KEYS:
            self._arguments = value
        return bool(value)

    def emit_rest(self, source: Source) -> None:
        """Emit a call whose arguments preceded its name, or that has none."""
        if not self.is_reported:
            source.emit(Kind.CALL, self.name)
            source.emit(Kind.ARGUMENTS, _text_of(self._arguments) or self._arguments)


def pass_arguments(source: Source) -> Reading[None]:
    """Emit the arguments as they arrive; arguments written as a JSON string only when complete."""
    if (yield from source.peek()) != '"':
        yield from source.pass_value(Kind.ARGUMENTS)
        return
    text = yield from source.value()
    if text:
        source.emit(Kind.ARGUMENTS, _text_of(text) or text)
        source.drop()
    else:
        source.give_back(Kind.ARGUMENTS)


def _text_of(value: str) -> str | None:
    """Return the text of a JSON string; None if ``value`` is not one."""
    if not value.startswith('"'):
        return None
    try:
        text = json.loads(value, strict=False)  # some models do not escape line ends
    except ValueError:
        return None
    return text if isinstance(text, str) else None
