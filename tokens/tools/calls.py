"""One call as a JSON object, ``{"name": …, "arguments": {…}}``: what most families write between their marks."""

import json
from collections.abc import Collection
from typing import Final

from tokens.tools.source import MAX_HELD_CHARS, Kind, Reading, Source

ARGUMENT_KEYS: Final = frozenset({"arguments", "parameters"})
NO_ARGUMENTS: Final = "{}"


def read_call(source: Source, names: Collection[str] | None = None) -> Reading[bool]:
    """Read one call and what space follows; False, with the text looked at and nothing told, where there is none.

    The call begins to be told as soon as its name is known and its arguments begin; from then on what the model writes
    is the arguments, right or wrong, as with OpenAI. ``names``: those that a call must have to be one.
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
    if not call.is_told and (separator != "}" or not call.name):
        return False
    call.tell_rest(source)
    if separator == "}":
        source.at += 1
    yield from source.skip_space()
    return True


class _Call:
    """What is known of a call that is being read."""

    def __init__(self, names: Collection[str] | None) -> None:
        self.name = ""
        self.is_told = False
        self._names = names
        self._arguments = NO_ARGUMENTS  # where they stand before the name

    def read_member(self, source: Source) -> Reading[bool]:
        """Read a key and its value; False where this is no call, or ends."""
        key = _text_of((yield from source.value()))
        if key is None or (yield from source.peek()) != ":":
            return False
        source.at += 1
        if key in ARGUMENT_KEYS and self.name and not self.is_told:
            self.is_told = True
            source.tell(Kind.CALL, self.name)
            yield from pass_arguments(source)
            return True
        value = yield from source.value()
        if key == "name":
            self.name = _text_of(value) or ""
            return bool(self.name) and (self._names is None or self.name in self._names)
        if key in ARGUMENT_KEYS:
            self._arguments = value
        return bool(value)

    def tell_rest(self, source: Source) -> None:
        """Tell a call whose arguments stood before its name, or that has none."""
        if not self.is_told:
            source.tell(Kind.CALL, self.name)
            source.tell(Kind.ARGUMENTS, _text_of(self._arguments) or self._arguments)


def pass_arguments(source: Source) -> Reading[None]:
    """Tell the arguments as they come; those that were written as a string of JSON when they are complete."""
    if (yield from source.peek()) != '"':
        yield from source.pass_value(Kind.ARGUMENTS)
        return
    text = yield from source.value()
    if text:
        source.tell(Kind.ARGUMENTS, _text_of(text) or text)
        source.drop()
    else:
        source.give_back(Kind.ARGUMENTS)


def _text_of(value: str) -> str | None:
    """The text of a JSON string; None if ``value`` is none."""
    if not value.startswith('"'):
        return None
    try:
        text = json.loads(value, strict=False)  # some models write line ends as they are
    except ValueError:
        return None
    return text if isinstance(text, str) else None
