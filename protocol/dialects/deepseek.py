"""DeepSeek's two tool-call formats: the one of V3 and R1, and the one of V3.1.

    <｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather
    ```json
    {"city": "Paris"}
    ```<｜tool▁call▁end｜><｜tool▁calls▁end｜>

    <｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>{"city": "Paris"}<｜tool▁call▁end｜>
    <｜tool▁calls▁end｜>

the second without the line end. Both versions' readers accept both formats.
"""

import re
from dataclasses import replace
from typing import Final

from protocol.dialects.lark import LarkGrammar, literal
from protocol.dialects.sections import Section

CALL: Final = "<｜tool▁call▁begin｜>"
SEPARATOR: Final = "<｜tool▁sep｜>"
FENCE: Final = "```"
_HEAD: Final = re.compile(
    rf"\s*(?:function{SEPARATOR}\s*(?=[\w.-])|(?=[\w.-]+\s*{SEPARATOR}))(?P<name>[\w.-]+)(?:{SEPARATOR}|```(?:json)?|\s)*"
)


def _write_head(lark: LarkGrammar, name: str) -> str:
    return f"{literal(name)} {lark.mark(SEPARATOR)}"


def _write_older_head(lark: LarkGrammar, name: str) -> str:
    return f"{literal('function')} {lark.mark(SEPARATOR)} {literal(f'{name}{chr(10)}{FENCE}json{chr(10)}')}"


DEEPSEEK_V31: Final = Section(
    opens=("<｜tool▁calls▁begin｜>",),
    close="<｜tool▁calls▁end｜>",
    call=CALL,
    end_of_call="<｜tool▁call▁end｜>",
    between="",
    inner_marks=(SEPARATOR,),
    head=_HEAD,
    write_head=_write_head,
    fence=FENCE,
)
DEEPSEEK_V3: Final = replace(DEEPSEEK_V31, between="\n", write_head=_write_older_head, after_arguments=f"\n{FENCE}")
