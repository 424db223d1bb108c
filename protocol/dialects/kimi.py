"""The format of Kimi K2: each call begins with its id, made of its name and the number of earlier calls.

    <|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0<|tool_call_argument_begin|>{"city": "Paris"}
    <|tool_call_end|><|tool_calls_section_end|>

without the line end. Its templates write the id instead of the name into later prompts, so clients get that id.
"""

import re
from typing import Final

from protocol.dialects.lark import LarkGrammar, literal
from protocol.dialects.sections import Section

OPENS: Final = ("<|tool_calls_section_begin|>", "<|tool_call_section_begin|>")  # the model sometimes writes the second
CALL: Final = "<|tool_call_begin|>"
ARGUMENTS: Final = "<|tool_call_argument_begin|>"
_FUNCTIONS: Final = "functions."


def _write_head(lark: LarkGrammar, name: str) -> str:
    return f"{literal(f'{_FUNCTIONS}{name}:')} /[0-9]{{1,4}}/ {lark.mark(ARGUMENTS)}"


KIMI_K2: Final = Section(
    opens=OPENS,
    close="<|tool_calls_section_end|>",
    call=CALL,
    end_of_call="<|tool_call_end|>",
    between="",
    inner_marks=(ARGUMENTS,),
    head=re.compile(rf"\s*(?:functions\.)?(?P<name>[\w.-]+)(?::(?P<number>\d{{1,9}}))?\s*{re.escape(ARGUMENTS)}\s*"),
    write_head=_write_head,
    own_id=_FUNCTIONS + "{name}:{number}",
)
