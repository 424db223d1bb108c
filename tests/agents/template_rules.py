"""What the chat templates of some families demand of a conversation; the words of their errors are theirs.

"tools unknown" needs a prompt of ours for tools.
"""

from typing import Final

from tests.tool_templates import THINKING_STYLE

_SYSTEM_FIRST = (
    "{%- for message in messages %}{%- if message.role == 'system' and not loop.first %}"
    "{{- raise_exception('System message must be at the beginning.') }}{%- endif %}{%- endfor %}" + THINKING_STYLE
)
_ALTERNATING = (
    "{%- set ns = namespace(index=0) %}{%- for message in messages %}"
    "{%- if message.role == 'user' or (message.role == 'assistant' and not message.tool_calls) %}"
    "{%- if (message.role == 'user') != (ns.index % 2 == 0) %}"
    "{{- raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{%- endif %}"
    "{%- set ns.index = ns.index + 1 %}{%- endif %}{%- endfor %}" + THINKING_STYLE
)
_WITHOUT_TOOLS = (
    "{%- for message in messages %}{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}"
    "{%- endfor %}{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)

RULES: Final = {
    "no rule": THINKING_STYLE,
    "system first": _SYSTEM_FIRST,
    "alternating": _ALTERNATING,
    "tools unknown": _WITHOUT_TOOLS,
}
