"""Qwen 3 Coder and later Qwens.

<tool_call>
<function=get_weather>
<parameter=city>
Paris
</parameter>
</function>
</tool_call>
"""

from typing import Final

from protocol.dialects.tagged import Tags

QWEN_CODER: Final = Tags(
    before_name="<function=",
    after_name=">",
    before_key="<parameter=",
    after_key=">",
    before_value="",
    after_value="</parameter>",
    after_values="</function>",
    has_lines=True,
)
