"""Llama 3: an answer that is a JSON object is a call.

    {"name": "get_weather", "parameters": {"city": "Paris"}}

Several are separated by semicolons; ``<|python_tag|>`` may stand before the first. As JSON may also be an answer, a
call is one of the request's own tools.
"""

from collections.abc import Collection, Sequence
from typing import Final

from tokens.tools.base import Schemas, Tool
from tokens.tools.calls import read_call
from tokens.tools.lark import LarkGrammar
from tokens.tools.marked import json_calls, new_call_id
from tokens.tools.source import Kind, Reading, Source

PYTHON_TAG: Final = "<|python_tag|>"


class LlamaFormat:
    """See the module and ToolFormat."""

    marks: tuple[str, ...] = (PYTHON_TAG,)
    reads_reasoning = False

    def read(self, source: Source, tools: Schemas) -> Reading[None]:
        """See ToolFormat."""
        if (yield from source.peek()) == "{":
            yield from _read_calls(source, tools)
        while (yield from source.pass_until((PYTHON_TAG,), Kind.CONTENT)):
            yield from _read_calls(source, tools)

    def call_id(self) -> str:
        """See ToolFormat."""
        return new_call_id()

    def forced(self, lark: LarkGrammar, tools: Sequence[Tool], *, most: int) -> str:
        """See ToolFormat. One call: its templates take no more into a conversation."""
        del most
        return json_calls(lark, tools, "parameters")

    def free(self, lark: LarkGrammar, tools: Sequence[Tool], *, most: int) -> str:
        """See ToolFormat."""
        text = lark.rule(r"/[ \t\r\n]*([^{ \t\r\n](.|\n)*)?/")
        return f"{text} | {lark.mark(PYTHON_TAG)}? {self.forced(lark, tools, most=most)}"

    def answer(self, lark: LarkGrammar, content: str) -> None:
        """See ToolFormat."""
        del lark, content


def _read_calls(source: Source, names: Collection[str]) -> Reading[None]:
    while (yield from read_call(source, names)):
        if (yield from source.peek()) != ";":
            return
        source.at += 1
        yield from source.skip_space()
    source.give_back(Kind.CONTENT)
