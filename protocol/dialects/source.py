"""The text of one choice as a stream for its readers, which wait for text that has not arrived yet.

A reader is a generator. It reads the text as if complete, and yields wherever it needs more, so that its result cannot
depend on how the text was split into frames. It *emits* parsed text as pieces; until then the text is *held*, so
that text that turns out not to be a call can still be emitted unchanged.

    text:  already emitted, dropped │ held, looked at │ held, not looked at
                                 0                 at
"""

import re
from collections.abc import Callable, Generator, Sequence
from enum import Enum, auto
from functools import cache
from typing import Final, NamedTuple, TypeVar

MAX_HELD_CHARS: Final = 65_536  # of one value that is parsed before it is emitted
MAX_LAYOUT_CHARS: Final = 64  # white space before a mark that is not content

_T = TypeVar("_T")
Reading = Generator[None, None, _T]  # yields when it needs more text

_SPACE: Final = re.compile(r"\s*")
_IN_STRING: Final = re.compile(r'["\\]')
_IN_CONTAINER: Final = re.compile(r'["{}\[\]]')
_AFTER_SCALAR: Final = re.compile(r"[,}\]\s]")


class Kind(Enum):
    """The kind of a piece of an answer."""

    CONTENT = auto()
    REASONING = auto()
    CALL = auto()  # a call of a tool begins; the text is the tool's name
    ARGUMENTS = auto()  # of the latest call, as JSON text
    REFUSAL = auto()  # only of answers that arrive in parts


class Piece(NamedTuple):
    """A parsed part of an answer."""

    kind: Kind
    text: str
    call_id: str = ""  # of a call, if the model wrote one


class Source:
    """The text of one choice: fed by the parser, read and emitted by readers."""

    def __init__(self) -> None:
        self.at = 0
        self.has_ended = False
        # Begin and end of each stretch in the complete text.
        self.reasoning: list[tuple[int, int]] = []
        self.content: list[tuple[int, int]] = []
        self._begin = 0  # offset of ``_text`` in the complete text
        self._text = ""
        self._pieces: list[tuple[Kind, list[str], str]] = []

    # --- for the parser -----------------------------------------------------------------------------------------------

    def feed(self, text: str) -> None:
        """Add text that has arrived."""
        self._text += text

    def take_pieces(self) -> list[Piece]:
        """Return the pieces emitted since the last call."""
        pieces, self._pieces = self._pieces, []
        return [Piece(kind, "".join(texts), call_id) for kind, texts, call_id in pieces]

    def take_content(self) -> list[tuple[int, int]]:
        """Return the stretches of content emitted since the last call."""
        content, self.content = self.content, []
        return content

    @property
    def read_chars(self) -> int:
        """Number of characters that are emitted or dropped."""
        return self._begin

    # --- for readers: emitting ----------------------------------------------------------------------------------------

    def emit(self, kind: Kind, text: str, call_id: str = "") -> None:
        """Emit a piece; merge it with a preceding one of the same kind."""
        if self._pieces and self._pieces[-1][0] is kind is not Kind.CALL:
            self._pieces[-1][1].append(text)
        elif text:
            self._pieces.append((kind, [text], call_id))

    def drop(self) -> None:
        """Discard the peeked text: it has been parsed."""
        self._begin += self.at
        self._text, self.at = self._text[self.at :], 0

    def give_back(self, kind: Kind) -> None:
        """Emit the peeked text unchanged: it was not a call."""
        self._note(kind, self.at)
        self.emit(kind, self._text[: self.at])
        self.drop()

    # --- for readers: peeking -----------------------------------------------------------------------------------------

    def peek(self) -> Reading[str]:
        """Skip white space; return the next character, "" at the end."""
        while True:
            self.at = _end_of_space(self._text, self.at)
            if self.at < len(self._text):
                return self._text[self.at]
            if self.has_ended:
                return ""
            yield

    def skip_space(self) -> Reading[None]:
        """Discard the peeked text and white space after it."""
        self.drop()
        yield from self.peek()
        self.drop()

    def follows(self, mark: str) -> Reading[bool]:
        """Report whether ``mark`` comes next, ignoring white space before it; peek past it only if so."""
        start = self.at
        yield from self.peek()
        while len(self._text) - self.at < len(mark) and mark.startswith(self._text[self.at :]) and not self.has_ended:
            yield
        if self._text.startswith(mark, self.at):
            self.at += len(mark)
            return True
        self.at = start
        return False

    def skip(self, char: str) -> Reading[None]:
        """Discard the peeked text, and ``char`` if it comes next."""
        self.drop()
        while not self._text and not self.has_ended:
            yield
        if self._text.startswith(char):
            self.at = len(char)
            self.drop()

    def until(self, marks: Sequence[str], limit_chars: int) -> Reading[str | None]:
        """Return the text before the first of ``marks``, and stop there; None if none is within the limit."""
        start = looked_at = self.at
        pattern, longest = _any_of(tuple(marks)), max(map(len, marks))
        while True:
            found = pattern.search(self._text, looked_at, start + limit_chars)
            if found is not None:
                self.at = found.start()
                return self._text[start : found.start()]
            if self.has_ended or len(self._text) - start >= limit_chars:
                return None
            looked_at = max(start, len(self._text) - longest + 1)  # a mark may have begun
            yield

    def value(self) -> Reading[str]:
        """Return one JSON value after white space; "" if it does not end or is too long to hold."""
        yield from self.peek()
        start = seen = self.at
        limit = start + MAX_HELD_CHARS
        end = _ValueEnd()
        while True:
            found = end.find(self._text[seen:limit])
            if found is not None:
                self.at = seen + found
                return self._text[start : self.at]
            self.at = seen = min(len(self._text), limit)
            if self.has_ended or seen == limit:
                return ""
            yield

    # --- for readers: streaming ---------------------------------------------------------------------------------------

    def pass_until(
        self, marks: Sequence[str], kind: Kind, *, encode: Callable[[str], str] | None = None
    ) -> Reading[str | None]:
        """Emit text up to the first of ``marks``; return that mark, peeked at, or None if the text ends before.

        White space before a mark is held with it, unless the text is emitted through ``encode``.
        """
        self.at = 0
        pattern = _any_of(tuple(marks))
        has_layout = bool(marks) and encode is None
        while True:
            found = pattern.search(self._text) if marks else None
            if found is not None:
                sure = found.start()
            elif self.has_ended:
                sure = len(self._text)
            else:
                sure = len(self._text) - _possible_beginning(self._text, marks)
            if has_layout and (found is not None or not self.has_ended):
                sure = _start_of_layout(self._text, sure)
            text, self._text = self._text[:sure], self._text[sure:]
            self._note(kind, sure)
            self._begin += sure
            self.emit(kind, text if encode is None else encode(text))
            if found is not None:
                self.at = found.end() - sure
                return found.group()
            if self.has_ended:
                return None
            yield

    def _note(self, kind: Kind, chars: int) -> None:
        """Note where the next characters are, if they are reasoning or content."""
        noted = self.reasoning if kind is Kind.REASONING else self.content if kind is Kind.CONTENT else None
        if noted is None or not chars:
            return
        start = self._begin
        if noted and noted[-1][1] == start:
            start, _ = noted.pop()
        noted.append((start, self._begin + chars))

    def pass_value(self, kind: Kind) -> Reading[None]:
        """Emit one JSON value as it arrives, after discarding the peeked text."""
        yield from self.skip_space()
        end = _ValueEnd()
        while True:
            found = end.find(self._text)
            self.at = len(self._text) if found is None else found
            self.give_back(kind)
            if found is not None or self.has_ended:
                return
            yield


class _ValueEnd:
    """Finds the end of a JSON value in text that arrives in chunks. It counts brackets; it does not validate."""

    def __init__(self) -> None:
        self._depth = 0
        self._is_scalar: bool | None = None  # None: nothing has arrived yet
        self._in_string = False
        self._is_escaped = False

    def find(self, text: str) -> int | None:
        """Return how many characters of the next chunk belong to the value if it ends there, else None."""
        if self._is_scalar is None and text:
            self._is_scalar = text[0] not in '{["'
        if self._is_scalar:
            found = _AFTER_SCALAR.search(text)
            return None if found is None else found.start()
        place = 0
        while place < len(text):
            if self._is_escaped:
                self._is_escaped = False
                place += 1
                continue
            found = (_IN_STRING if self._in_string else _IN_CONTAINER).search(text, place)
            if found is None:
                return None
            place = found.end()
            self._take(found.group())
            if self._depth <= 0 and not self._in_string:
                return place
        return None

    def _take(self, char: str) -> None:
        if char == "\\":
            self._is_escaped = True
        elif char == '"':
            self._in_string = not self._in_string
        else:
            self._depth += 1 if char in "{[" else -1


def _end_of_space(text: str, start: int) -> int:
    found = _SPACE.match(text, start)
    return start if found is None else found.end()


def _start_of_layout(text: str, end: int) -> int:
    """Return the start of the white space before ``end``, at most MAX_LAYOUT_CHARS back."""
    return max(len(text[:end].rstrip()), end - MAX_LAYOUT_CHARS)


def _possible_beginning(text: str, marks: Sequence[str]) -> int:
    """Return how many characters at the end of ``text`` may be the beginning of a mark."""
    longest = min(len(text), max(map(len, marks), default=1) - 1)
    for length in range(longest, 0, -1):
        tail = text[-length:]
        if any(mark.startswith(tail) for mark in marks):
            return length
    return 0


@cache
def _any_of(marks: tuple[str, ...]) -> re.Pattern[str]:
    return re.compile("|".join(map(re.escape, marks)))
