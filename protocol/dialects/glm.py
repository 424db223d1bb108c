"""The tool-call format of GLM 4.5 and 4.6. Later versions omit the line breaks.

<tool_call>get_weather
<arg_key>city</arg_key>
<arg_value>Paris</arg_value>
</tool_call>
"""

from typing import Final

from protocol.dialects.tagged import Tags

GLM: Final = Tags(
    before_name="",
    after_name="",
    before_key="<arg_key>",
    after_key="</arg_key>",
    before_value="<arg_value>",
    after_value="</arg_value>",
    after_values="",
    has_lines=False,
)
