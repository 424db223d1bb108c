"""The format of Llama 3: an answer that is a JSON object is a call.

    {"name": "get_weather", "parameters": {"city": "Paris"}}

Several are separated by semicolons; ``<|python_tag|>`` may precede the first. JSON may also be an ordinary answer, so a
call must name one of the request's tools.
"""

from collections.abc import Collection, Sequence
from typing import Final

from protocol.dialects.base import Schemas, Tool
from protocol.dialects.calls import read_call
from protocol.dialects.lark import LarkGrammar
from protocol.dialects.marked import json_calls, new_call_id
from protocol.dialects.source import Kind, Reading, Source

PYTHON_TAG: Final = "<|python_tag|>"


class LlamaFormat:
    """Calls as bare JSON objects, separated by semicolons."""

    marks: tuple[str, ...] = (PYTHON_TAG,)
    reads_reasoning = False

    def read(self, source: Source, tools: Schemas) -> Reading[None]:
        """Read content and calls of ``tools`` to the end of the text."""
        if (yield from source.peek()) == "{":
            yield from _read_calls(source, tools)
        while (yield from source.pass_until((PYTHON_TAG,), Kind.CONTENT)):
            yield from _read_calls(source, tools)

    def call_id(self) -> str:
        """Return a new id for a call."""
        return new_call_id()

    def forced(self, lark: LarkGrammar, tools: Sequence[Tool], *, most: int) -> str:
        """Return an expression for one to ``most`` calls. One call: its templates accept no more in a conversation."""
        del most
        return json_calls(lark, tools, "parameters")

    def free(self, lark: LarkGrammar, tools: Sequence[Tool], *, most: int) -> str:
        """Return an expression for text with at most ``most`` valid calls."""
        text = lark.rule(r"/[ \t\r\n]*([^{ \t\r\n](.|\n)*)?/")
        return f"{text} | {lark.mark(PYTHON_TAG)}? {self.forced(lark, tools, most=most)}"

    def answer(self, lark: LarkGrammar, content: str) -> None:
        """Return an expression for an answer whose content is ``content``."""
        del lark, content


def _read_calls(source: Source, names: Collection[str]) -> Reading[None]:
    while (yield from read_call(source, names)):
        if (yield from source.peek()) != ";":
            return
        source.at += 1
        yield from source.skip_space()
    source.give_back(Kind.CONTENT)
