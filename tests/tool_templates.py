"""Chat templates that know tools, in the manner of several families: short, and each with its family's quirks."""

HERMES_STYLE = """{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{%- endif %}
    {{- '# Tools\\n<tools>' }}
    {%- for tool in tools %}{{- '\\n' }}{{- tool | tojson }}{%- endfor %}
    {{- '\\n</tools>\\nCall as <tool_call>\\n{\\"name\\": …, \\"arguments\\": …}\\n</tool_call><|im_end|>\\n' }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'user' or (message.role == 'system' and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
    {%- elif message.role == 'assistant' %}
        {{- '<|im_start|>assistant' }}
        {%- if message.content %}{{- '\\n' + message.content }}{%- endif %}
        {%- for call in message.tool_calls %}
            {%- if call.function %}{%- set call = call.function %}{%- endif %}
            {{- '\\n<tool_call>\\n{\\"name\\": \\"' + call.name + '\\", \\"arguments\\": ' }}
            {{- call.arguments | tojson }}{{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == 'tool' %}
        {%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{- '<|im_start|>user' }}{%- endif %}
        {{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
        {%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\\n' }}{%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""

THINKING_STYLE = HERMES_STYLE.replace(
    "'<|im_start|>assistant\\n' }}{%- endif %}",
    "'<|im_start|>assistant\\n' }}{%- if enable_thinking is defined and not enable_thinking %}"
    "{{- '<think>\\n\\n</think>\\n\\n' }}{%- else %}{{- '<think>\\n' }}{%- endif %}{%- endif %}",
)

LLAMA_STYLE = """{{- bos_token }}
{%- if not tools is defined %}{%- set tools = none %}{%- endif %}
{{- '<|start_header_id|>system<|end_header_id|>\\n\\n' }}
{%- if tools is not none %}
    {{- 'Environment: ipython\\nRespond as {"name": function name, "parameters": its arguments}.\\n' }}
    {%- for t in tools %}{{- t | tojson(indent=4) }}{{- '\\n\\n' }}{%- endfor %}
{%- endif %}
{{- '<|eot_id|>' }}
{%- for message in messages %}
    {%- if not (message.role == 'ipython' or message.role == 'tool' or 'tool_calls' in message) %}
        {{- '<|start_header_id|>' + message.role + '<|end_header_id|>\\n\\n' + message.content | trim + '<|eot_id|>' }}
    {%- elif 'tool_calls' in message %}
        {%- if not message.tool_calls | length == 1 %}{{- raise_exception('only one call at once') }}{%- endif %}
        {%- set call = message.tool_calls[0].function %}
        {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n{"name": "' + call.name + '", "parameters": ' }}
        {{- call.arguments | tojson }}{{- '}<|eot_id|>' }}
    {%- else %}
        {{- '<|start_header_id|>ipython<|end_header_id|>\\n\\n' }}
        {%- if message.content is mapping or message.content is iterable and message.content is not string %}
            {{- message.content | tojson }}
        {%- else %}{{- message.content }}{%- endif %}
        {{- '<|eot_id|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif %}"""

MISTRAL_STYLE = """{{- bos_token }}
{%- if tools %}{{- '[AVAILABLE_TOOLS] [' }}
    {%- for tool in tools %}
        {{- '{"type": "function", "function": {' }}
        {%- for key, value in tool.function.items() if key != 'return' %}
            {%- if value is string %}{{- '"' + key + '": "' + value + '"' }}
            {%- else %}{{- '"' + key + '": ' + value | tojson }}{%- endif %}
            {%- if not loop.last %}{{- ', ' }}{%- endif %}
        {%- endfor %}{{- '}}' }}{%- if not loop.last %}{{- ', ' }}{%- endif %}
    {%- endfor %}{{- '][/AVAILABLE_TOOLS]' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'user' %}{{- '[INST] ' + message.content + '[/INST]' }}
    {%- elif message.tool_calls is defined and message.tool_calls is not none %}
        {{- '[TOOL_CALLS] [' }}
        {%- for call in message.tool_calls %}
            {%- set out = call.function | tojson %}{{- out[:-1] }}
            {%- if not call.id is defined or call.id | length != 9 %}{{- raise_exception('not 9 letters') }}{%- endif %}
            {{- ', "id": "' + call.id + '"}' }}{%- if not loop.last %}{{- ', ' }}{%- endif %}
        {%- endfor %}{{- ']' + eos_token }}
    {%- elif message.role == 'tool' %}
        {{- '[TOOL_RESULTS] {"content": ' + message.content | string + ', "call_id": "' + message.tool_call_id + '"}' }}
        {{- '[/TOOL_RESULTS]' }}
    {%- elif message.content %}{{- ' ' + message.content + eos_token }}{%- endif %}
{%- endfor %}"""

HARMONY_STYLE = """{%- if reasoning_effort is not defined %}{%- set reasoning_effort = 'medium' %}{%- endif %}
{{- '<|start|>system<|message|>Reasoning: ' + reasoning_effort + '\\n# Channels: analysis, commentary, final.<|end|>' }}
{%- if tools %}{{- '<|start|>developer<|message|># Tools\\nnamespace functions {\\n' }}
    {%- for tool in tools %}
        {%- set tool = tool.function %}{{- '// ' + tool.description + '\\ntype ' + tool.name + ' = (_: {' }}
        {%- for name, spec in tool.parameters.properties.items() %}{{- name + ': ' + spec.type + ',' }}{%- endfor %}
        {{- '}) => any;\\n' }}
    {%- endfor %}{{- '}<|end|>' }}
{%- endif %}
{%- set last = namespace(name=none) %}
{%- for message in messages %}
    {%- if message.role == 'assistant' and message.tool_calls %}
        {%- if message.content and message.thinking %}{{- raise_exception('not both') }}{%- endif %}
        {%- if message.thinking %}
            {{- '<|start|>assistant<|channel|>analysis<|message|>' + message.thinking + '<|end|>' }}
        {%- endif %}
        {%- set call = message.tool_calls[0].function %}{%- set last.name = call.name %}
        {{- '<|start|>assistant to=functions.' + call.name + '<|channel|>commentary json<|message|>' }}
        {{- call.arguments | tojson }}{{- '<|call|>' }}
    {%- elif message.role == 'tool' %}
        {{- '<|start|>functions.' + last.name + ' to=assistant<|channel|>commentary<|message|>' }}
        {{- message.content | tojson }}{{- '<|end|>' }}
    {%- elif message.role == 'assistant' %}
        {{- '<|start|>assistant<|channel|>final<|message|>' + message.content + '<|end|>' }}
    {%- else %}{{- '<|start|>' + message.role + '<|message|>' + message.content + '<|end|>' }}{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start|>assistant' }}{%- endif %}"""


DEEPSEEK_V3_STYLE = """{{- bos_token }}
{%- if tools %}{{- '# Tools\\n' }}{%- for tool in tools %}{{- tool | tojson + '\\n' }}{%- endfor %}{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'user' %}{{- '<｜User｜>' + message.content + '<｜Assistant｜>' }}
    {%- elif message.tool_calls is defined and message.tool_calls is not none %}
        {{- (message.content or '') + '<｜tool▁calls▁begin｜>' }}
        {%- for call in message.tool_calls %}
            {{- '<｜tool▁call▁begin｜>' + call.type + '<｜tool▁sep｜>' + call.function.name + '\\n```json\\n' }}
            {{- call.function.arguments | tojson + '\\n```<｜tool▁call▁end｜>' }}
            {%- if not loop.last %}{{- '\\n' }}{%- endif %}
        {%- endfor %}{{- '<｜tool▁calls▁end｜><｜end▁of▁sentence｜>' }}
    {%- elif message.role == 'tool' %}
        {{- '<｜tool▁output▁begin｜>' + message.content + '<｜tool▁output▁end｜>' }}
    {%- else %}{{- message.content + '<｜end▁of▁sentence｜>' }}{%- endif %}
{%- endfor %}"""

# It joins arguments as if they were a text.
DEEPSEEK_V31_STYLE = """{%- if not thinking is defined %}{%- set thinking = false %}{%- endif %}
{{- bos_token }}
{%- if tools %}{{- '## Tools\\n' }}{%- for tool in tools %}{{- tool | tojson + '\\n' }}{%- endfor %}{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'user' %}{{- '<｜User｜>' + message.content }}
    {%- elif message.tool_calls is defined and message.tool_calls is not none %}
        {{- '<｜Assistant｜></think>' + (message.content or '') + '<｜tool▁calls▁begin｜>' }}
        {%- for call in message.tool_calls %}
            {{- '<｜tool▁call▁begin｜>' + call.function.name + '<｜tool▁sep｜>' + call.function.arguments }}
            {{- '<｜tool▁call▁end｜>' }}
        {%- endfor %}{{- '<｜tool▁calls▁end｜><｜end▁of▁sentence｜>' }}
    {%- elif message.role == 'tool' %}
        {{- '<｜tool▁output▁begin｜>' + message.content + '<｜tool▁output▁end｜>' }}
    {%- else %}{{- '<｜Assistant｜></think>' + message.content + '<｜end▁of▁sentence｜>' }}{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<｜Assistant｜>' }}{%- if thinking %}{{- '<think>' }}{%- else %}{{- '</think>' }}{%- endif %}
{%- endif %}"""

GLM_STYLE = """{{- '[gMASK]<sop>' }}
{%- if tools %}{{- '<|system|>\\n# Tools\\n<tools>' }}
    {%- for tool in tools %}{{- '\\n' + tool | tojson(ensure_ascii=False) }}{%- endfor %}{{- '\\n</tools>' }}
{%- endif %}
{%- for m in messages %}
    {%- if m.role == 'user' %}{{- '<|user|>\\n' + m.content }}
    {%- elif m.role == 'assistant' %}{{- '<|assistant|>\\n<think></think>' }}
        {%- if m.content %}{{- '\\n' + m.content }}{%- endif %}
        {%- for tc in m.tool_calls or [] %}
            {%- if tc.function %}{%- set tc = tc.function %}{%- endif %}{{- '\\n<tool_call>' + tc.name + '\\n' }}
            {%- for k, v in tc.arguments.items() %}{{- '<arg_key>' + k + '</arg_key>\\n<arg_value>' }}
                {{- v | tojson(ensure_ascii=False) if v is not string else v }}{{- '</arg_value>\\n' }}
            {%- endfor %}{{- '</tool_call>' }}
        {%- endfor %}
    {%- elif m.role == 'tool' %}{{- '<|observation|>\\n<tool_response>\\n' + m.content + '\\n</tool_response>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|assistant|>' }}{%- endif %}"""

KIMI_STYLE = """{%- if tools -%}<|im_system|>tool_declare<|im_middle|>{{ tools | tojson }}<|im_end|>{%- endif -%}
{%- for message in messages -%}
    {%- if message['role'] == 'user' -%}<|im_user|>user<|im_middle|>
    {%- elif message['role'] == 'assistant' -%}<|im_assistant|>assistant<|im_middle|>
    {%- else -%}<|im_system|>{{ message['role'] }}<|im_middle|>{%- endif -%}
    {%- if message['role'] == 'assistant' and message.get('tool_calls') -%}
        {{ message['content'] or '' }}<|tool_calls_section_begin|>
        {%- for call in message['tool_calls'] -%}
            <|tool_call_begin|>{{ call['id'] }}<|tool_call_argument_begin|>
            {%- if call['function']['arguments'] is string %}{{ call['function']['arguments'] }}
            {%- else %}{{ call['function']['arguments'] | tojson }}{% endif %}<|tool_call_end|>
        {%- endfor -%}<|tool_calls_section_end|>
    {%- elif message['role'] == 'tool' -%}## Return of {{ message.tool_call_id }}\\n{{ message['content'] }}
    {%- else -%}{{ message['content'] }}{%- endif -%}<|im_end|>
{%- endfor -%}
{%- if add_generation_prompt -%}<|im_assistant|>assistant<|im_middle|>{%- endif -%}"""
