"""Tools for models whose chat template supports none: described in the system message, called in Hermes' format.

This format is in the training data of most models, and its tags are plain text in every vocabulary. Earlier calls and
their results are written in the same form (``gateway.tokenizing.turns``).
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final

_BEFORE: Final = """\
You can call the following tools. Each line describes one: its name, what it does, and the JSON Schema of its arguments.
<tools>
"""
_AFTER: Final = """
</tools>
To call a tool, write one JSON object with its name and its arguments between these tags:
<tool_call>
{"name": "the name of the tool", "arguments": {"an argument": "its value"}}
</tool_call>
Each further call has its own tags. Write nothing after your calls. Their results come in the next message, between
<tool_response> and </tool_response>. Where no tool is needed, answer without tags."""


def with_tool_prompt(
    messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]
) -> list[Mapping[str, Any]]:
    """Return a conversation whose first system message describes tools, as chat templates expect them."""
    lines = "\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools)
    prompt = f"{_BEFORE}{lines}{_AFTER}"
    if messages and messages[0]["role"] == "system":
        first = {**messages[0], "content": f"{messages[0]['content']}\n\n{prompt}"}
        return [first, *messages[1:]]
    return [{"role": "system", "content": prompt}, *messages]
