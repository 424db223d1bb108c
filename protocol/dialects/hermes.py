"""The format of Hermes, Qwen 2.5 and 3, and many models tuned like them.

Let me see.
<tool_call>
{"name": "get_weather", "arguments": {"city": "Paris"}}
</tool_call>
"""

from collections.abc import Sequence
from typing import Final

from protocol.dialects.base import Schemas, Tool
from protocol.dialects.calls import read_call
from protocol.dialects.lark import LarkGrammar, literal
from protocol.dialects.marked import free_text, json_calls, new_call_id, repeated
from protocol.dialects.source import Kind, Reading, Source

OPEN: Final = "<tool_call>"
CLOSE: Final = "</tool_call>"
_NEW_LINE: Final = literal("\n")


class HermesFormat:
    """Calls as JSON between ``<tool_call>`` and ``</tool_call>``."""

    marks: tuple[str, ...] = (OPEN, CLOSE)
    reads_reasoning = False

    def read(self, source: Source, tools: Schemas) -> Reading[None]:
        """Read content and calls of ``tools`` to the end of the text."""
        del tools
        marks: tuple[str, ...] = (OPEN,)
        while mark := (yield from source.pass_until(marks, Kind.CONTENT)):
            if mark == CLOSE:
                yield from source.skip_space()
                marks = (OPEN,)
            elif (yield from read_call(source)):
                marks = (OPEN, CLOSE)
            else:
                source.give_back(Kind.CONTENT)

    def call_id(self) -> str:
        """Return a new id for a call."""
        return new_call_id()

    def forced(self, lark: LarkGrammar, tools: Sequence[Tool], *, most: int) -> str:
        """Return an expression for one to ``most`` calls."""
        call = lark.rule(f"{lark.mark(OPEN)} {_after_mark(lark, tools)}")
        return repeated(call, _NEW_LINE, most)

    def free(self, lark: LarkGrammar, tools: Sequence[Tool], *, most: int) -> str:
        """Return an expression for text with at most ``most`` valid calls."""
        return free_text(lark, OPEN, _after_mark(lark, tools), most)

    def answer(self, lark: LarkGrammar, content: str) -> str:
        """Return an expression for an answer whose content is ``content``."""
        del lark
        return content


def _after_mark(lark: LarkGrammar, tools: Sequence[Tool]) -> str:
    return f"{_NEW_LINE} {json_calls(lark, tools)} {_NEW_LINE} {lark.mark(CLOSE)}"
