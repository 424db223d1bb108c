"""Small chat templates with the rules of published ones: what each takes, refuses or leaves out of a conversation."""

from typing import Final

# One system message, and only at the beginning; a message of the user; arguments of calls are objects.
SYSTEM_FIRST: Final = """\
{%- if tools %}{{ tools | tojson }}{% endif %}
{%- if not messages | selectattr('role', 'equalto', 'user') | list %}
{{- raise_exception('No user query found.') }}{% endif %}
{%- for message in messages %}
{%- if message.role == 'system' %}
{%- if not loop.first %}{{ raise_exception('System message must be at the beginning.') }}{% endif %}
{{- '<|im_start|>system\\n' + message.content + '<|im_end|>\\n' }}
{%- elif message.role in ('user', 'tool') %}
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- elif message.role == 'assistant' %}
{{- '<|im_start|>assistant\\n' + message.content }}
{%- for call in message.tool_calls or [] %}
{{- '<tool_call><function=' + call.function.name + '>' }}
{%- for name, value in call.function.arguments | items %}
{{- '<parameter=' + name + '>' + (value if value is string else value | tojson) + '</parameter>' }}
{%- endfor %}{{- '</function></tool_call>' }}
{%- endfor %}{{- '<|im_end|>\\n' }}
{%- else %}{{ raise_exception('Unexpected message role.') }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""

# Anything, anywhere.
LENIENT: Final = """\
{%- if tools %}{{ tools | tojson }}{% endif %}
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\\n' + message.content }}
{%- for call in message.tool_calls or [] %}
{{- '<tool_call>' }}
{%- if call.function.arguments is string %}{{ call.function.arguments }}
{%- else %}{{ call.function.arguments | tojson }}{% endif %}{{ '</tool_call>' }}
{%- endfor %}{{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""

# One call in a message.
SINGLE_CALLS: Final = """\
{%- if messages[0].role == 'system' %}{% set system = messages[0].content %}{% set messages = messages[1:] %}
{%- else %}{% set system = '' %}{% endif %}
{{- '<|system|>' + system }}{% if tools %}{{ tools | tojson }}{% endif %}
{%- for message in messages %}
{%- if not (message.role == 'tool' or message.tool_calls) %}
{{- '<|' + message.role + '|>' + message.content }}
{%- elif message.tool_calls %}
{%- if message.tool_calls | length != 1 %}
{{- raise_exception('This model only supports single tool-calls at once!') }}{% endif %}
{%- set call = message.tool_calls[0].function %}
{{- '<|assistant|>{"name": "' + call.name + '", "parameters": ' }}{{ call.arguments | tojson }}{{ '}' }}
{%- else %}{{ '<|ipython|>' + message.content | tojson }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"""

_ALTERNATING: Final = """\
{%- for message in messages %}
{%- if (message.role == 'user') != (loop.index0 % 2 == 0) %}
{{- raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}
{{- '<start_of_turn>' + message.role + '\\n' + (prefix if loop.first else '') + message.content + '<end_of_turn>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<start_of_turn>model\\n' }}{% endif %}"""

# The system message is part of the user's first message; strict alternation; tools are unknown.
ALTERNATING: Final = (
    """\
{%- if messages[0].role == 'system' %}
{%- set prefix = messages[0].content + '\\n\\n' %}{% set messages = messages[1:] %}
{%- else %}{% set prefix = '' %}{% endif %}"""
    + _ALTERNATING
)

# The same without any system message.
NO_SYSTEM: Final = (
    """\
{%- set prefix = '' %}
{%- if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"""
    + _ALTERNATING
)

# Alternation between results of tools, too; ids of calls have nine letters; the system message is in the last message.
ALTERNATING_WITH_TOOLS: Final = """\
{%- if messages[0].role == 'system' %}{% set system = messages[0].content %}{% set messages = messages[1:] %}{% endif %}
{%- set ns = namespace(index=0) %}
{%- for message in messages %}
{%- if message.role == 'user' or (message.role == 'assistant' and not message.tool_calls) %}
{%- if (message.role == 'user') != (ns.index % 2 == 0) %}
{{- raise_exception('After the optional system message, conversation roles must alternate') }}{% endif %}
{%- set ns.index = ns.index + 1 %}
{%- endif %}
{%- endfor %}
{%- if tools %}{{ '[AVAILABLE_TOOLS]' }}{{ tools | tojson }}{% endif %}
{%- for message in messages %}
{%- if message.role == 'user' %}
{{- '[INST]' + (system + '\\n\\n' if loop.last and system else '') + message.content + '[/INST]' }}
{%- elif message.tool_calls %}
{{- message.content + '[TOOL_CALLS]' }}
{%- for call in message.tool_calls %}
{%- if call.id | length != 9 %}
{{- raise_exception('Tool call IDs should be alphanumeric strings with length 9!') }}{% endif %}
{{- call.function | tojson }}
{%- endfor %}
{%- elif message.role == 'assistant' %}
{%- if not message.content %}{{ raise_exception('Assistant message must have content or tool calls') }}{% endif %}
{{- ' ' + message.content + '</s>' }}
{%- elif message.role == 'tool' %}
{{- '[TOOL_RESULTS]' + message.content + message.tool_call_id + '[/TOOL_RESULTS]' }}
{%- else %}{{ raise_exception('Only user and assistant roles are supported') }}{% endif %}
{%- endfor %}"""

# System messages anywhere, all written at the beginning; arguments of calls are joined to text.
SYSTEMS_COLLECTED: Final = """\
{%- set ns = namespace(system='') %}
{%- for message in messages %}
{%- if message.role == 'system' %}{% set ns.system = ns.system + message.content + '\\n\\n' %}{% endif %}
{%- endfor %}
{{- ns.system }}{% if tools %}{{ tools | tojson }}{% endif %}
{%- for message in messages %}
{%- if message.role == 'user' %}{{ '<|User|>' + message.content }}
{%- elif message.role == 'assistant' %}{{ '<|Assistant|>' + message.content }}
{%- for call in message.tool_calls or [] %}
{{- '<|call|>' + call.function.name + '<|sep|>' + call.function.arguments }}{% endfor %}
{%- elif message.role == 'tool' %}{{ '<|output|>' + message.content }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|Assistant|>' }}{% endif %}"""

# Later system messages are left out without a word; one call in a message, whose reasoning stands in content or apart.
CHANNELS: Final = """\
{%- if messages[0].role == 'system' %}
{{- '<|start|>developer<|message|>' + messages[0].content }}{% set messages = messages[1:] %}{% endif %}
{%- if tools %}{{ tools | tojson }}{% endif %}
{%- for message in messages %}
{%- if message.role == 'assistant' %}
{%- if message.tool_calls %}
{%- if message.content and message.thinking %}
{{- raise_exception('Cannot pass both content and thinking in an assistant message with tool calls!') }}
{%- elif message.content %}{{ '<|channel|>analysis<|message|>' + message.content }}
{%- elif message.thinking %}{{ '<|channel|>analysis<|message|>' + message.thinking }}{% endif %}
{{- '<|start|>assistant to=functions.' + message.tool_calls[0].function.name + '<|message|>' }}
{{- message.tool_calls[0].function.arguments | tojson + '<|call|>' }}
{%- else %}{{ '<|start|>assistant<|channel|>final<|message|>' + message.content + '<|end|>' }}{% endif %}
{%- elif message.role == 'tool' %}{{ '<|start|>functions to=assistant<|message|>' + message.content | tojson }}
{%- elif message.role == 'user' %}{{ '<|start|>user<|message|>' + message.content + '<|end|>' }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|start|>assistant' }}{% endif %}"""

# Later system messages are left out without a word; arguments of calls must be objects.
SYSTEM_LEFT_OUT: Final = """\
{%- if messages[0].role == 'system' %}
{{- ']~b]system\\n' + messages[0].content }}{% set messages = messages[1:] %}{% endif %}
{%- if tools %}{{ tools | tojson }}{% endif %}
{%- for message in messages %}
{%- if message.role == 'assistant' %}{{ ']~b]ai\\n' + message.content }}
{%- for call in message.tool_calls or [] %}<invoke name="{{ call.function.name }}">
{%- for name, value in call.function.arguments.items() %}
{{- '<parameter name="' + name + '">' }}{{ value if value is string else value | tojson }}{{ '</parameter>' }}
{%- endfor %}</invoke>{% endfor %}
{%- elif message.role == 'tool' %}{{ ']~b]tool\\n' + message.content }}
{%- elif message.role == 'user' %}{{ ']~b]user\\n' + message.content }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ ']~b]ai\\n' }}{% endif %}"""

# Whose rules they have.
PUBLISHED: Final = {
    "Qwen 3.5": SYSTEM_FIRST,
    "Qwen 3, GLM 4.6, Kimi K2, Phi 4": LENIENT,
    "Llama 3": SINGLE_CALLS,
    "Gemma 3": ALTERNATING,
    "Gemma 2": NO_SYSTEM,
    "Mistral": ALTERNATING_WITH_TOOLS,
    "DeepSeek V3": SYSTEMS_COLLECTED,
    "gpt-oss": CHANNELS,
    "MiniMax M2": SYSTEM_LEFT_OUT,
}
