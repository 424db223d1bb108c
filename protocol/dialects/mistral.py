"""Mistral's two formats, older and newer tokenizers'.

    [TOOL_CALLS][{"name": "get_weather", "arguments": {"city": "Paris"}}]
    [TOOL_CALLS]get_weather[ARGS]{"city": "Paris"}

The newer one repeats the mark for each further call, and may have ``[CALL_ID]…`` after the name.
"""

import re
import secrets
import string
from collections.abc import Sequence
from typing import Final

from protocol.dialects.base import Schemas, Tool
from protocol.dialects.calls import pass_arguments, read_call
from protocol.dialects.lark import LarkGrammar, literal, one_of
from protocol.dialects.marked import free_text, json_calls, repeated
from protocol.dialects.source import Kind, Reading, Source

OPEN: Final = "[TOOL_CALLS]"
ARGS: Final = "[ARGS]"
CALL_ID: Final = "[CALL_ID]"
CALL_ID_CHARS: Final = 9  # its templates refuse ids of any other length
MAX_HEAD_CHARS: Final = 256  # name and id
_NAME: Final = re.compile(r"[\w.-]+")


class MistralFormat:
    """Calls after ``[TOOL_CALLS]``. ``is_new`` selects the format of grammars; both formats are read."""

    marks: tuple[str, ...] = (OPEN, ARGS, CALL_ID)
    reads_reasoning = False

    def __init__(self, *, is_new: bool) -> None:
        self._is_new = is_new

    def read(self, source: Source, tools: Schemas) -> Reading[None]:
        """Read content and calls of ``tools`` to the end of the text."""
        del tools
        while (yield from source.pass_until((OPEN,), Kind.CONTENT)):
            is_list = (yield from source.peek()) == "["
            yield from _read_list(source) if is_list else _read_named(source)

    def call_id(self) -> str:
        """Return a new id for a call."""
        letters = string.ascii_letters + string.digits
        return "".join(secrets.choice(letters) for _ in range(CALL_ID_CHARS))

    def forced(self, lark: LarkGrammar, tools: Sequence[Tool], *, most: int) -> str:
        """Return an expression for one to ``most`` calls."""
        call = lark.rule(f"{lark.mark(OPEN)} {self._after_mark(lark, tools, most)}")
        return repeated(call, "", most) if self._is_new else call

    def free(self, lark: LarkGrammar, tools: Sequence[Tool], *, most: int) -> str:
        """Return an expression for text with at most ``most`` valid calls."""
        return free_text(lark, OPEN, self._after_mark(lark, tools, most), most if self._is_new else 1)

    def answer(self, lark: LarkGrammar, content: str) -> str:
        """Return an expression for an answer whose content is ``content``."""
        del lark
        return content

    def _after_mark(self, lark: LarkGrammar, tools: Sequence[Tool], most: int) -> str:
        if not self._is_new:
            call = lark.rule(json_calls(lark, tools))
            return f"{literal('[')} {repeated(call, literal(', '), most)} {literal(']')}"
        return one_of([f"{literal(tool.name)} {lark.mark(ARGS)} {lark.json(tool.schema)}" for tool in tools])


def _read_list(source: Source) -> Reading[None]:
    source.at += 1
    while (yield from read_call(source)):
        separator = yield from source.peek()
        if separator in {",", "]"}:
            source.at += 1
            yield from source.skip_space()
        if separator != ",":
            return
    source.give_back(Kind.CONTENT)


def _read_named(source: Source) -> Reading[None]:
    head = yield from source.until((ARGS, "{"), MAX_HEAD_CHARS)
    name = (head or "").partition(CALL_ID)[0].strip()
    if not _NAME.fullmatch(name):
        source.give_back(Kind.CONTENT)
        return
    yield from source.follows(ARGS)
    source.emit(Kind.CALL, name)
    yield from pass_arguments(source)
    yield from source.skip_space()
