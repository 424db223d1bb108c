"""Tools described in the prompt: the prompt's text, and the grammar of answers."""

import json
from typing import Any

import pytest

from gateway.tokenizing.cards import usable_template
from gateway.tokenizing.encoder_pool import EncoderPool
from gateway.tokenizing.encoders import HuggingFaceEncoder
from gateway.tokenizing.model_tokens import ModelTokens
from protocol.dialects.base import Tool
from protocol.dialects.dialect import AnswerForm, Dialect
from protocol.dialects.generic import with_tool_prompt
from tests.agents.template_rules import RULES
from tests.chat_templates import ALTERNATING, NO_SYSTEM
from tests.small_tokenizer import CHATML, byte_tokenizer_json

LOOK = {"name": "look", "description": "Looks.", "parameters": {"type": "object", "properties": {}}}
TOOLS = [{"type": "function", "function": LOOK}]
SYSTEM = {"role": "system", "content": "Be kind."}
HI = {"role": "user", "content": "Hi"}
CALLED = {
    "role": "assistant",
    "content": "",
    "tool_calls": [{"id": "call_1", "type": "function", "function": {"name": "look", "arguments": {"at": "sky"}}}],
}
RESULT = {"role": "tool", "tool_call_id": "call_1", "content": "blue"}
PROMPT = """\
You can call the following tools. Each line describes one: its name, what it does, and the JSON Schema of its arguments.
<tools>
{"name": "look", "description": "Looks.", "parameters": {"type": "object", "properties": {}}}
</tools>
To call a tool, write one JSON object with its name and its arguments between these tags:
<tool_call>
{"name": "the name of the tool", "arguments": {"an argument": "its value"}}
</tool_call>
Each further call has its own tags. Write nothing after your calls. Their results come in the next message, between
<tool_response> and </tool_response>. Where no tool is needed, answer without tags."""
AS_TEXT = '<tool_call>\n{"name": "look", "arguments": {"at": "sky"}}\n</tool_call>'
RESULT_AS_TEXT = "<tool_response>\nblue\n</tool_response>"


def test_the_system_message_describes_tools() -> None:
    assert with_tool_prompt([HI], TOOLS) == [{"role": "system", "content": PROMPT}, HI]
    first, second = with_tool_prompt([SYSTEM, HI], TOOLS)
    assert (first["content"], second) == (f"Be kind.\n\n{PROMPT}", HI)


@pytest.mark.parametrize(
    ("template", "notes"),
    [
        (CHATML, {"tools-described", "tools-as-text"}),
        (RULES["tools unknown"], {"tools-described", "tools-as-text"}),
        (ALTERNATING, {"tools-described", "tools-as-text"}),
        (NO_SYSTEM, {"tools-described", "tools-as-text", "system-as-user"}),
        (RULES["system first"], {"tools-described", "tools-as-text"}),  # supports tools, but is not used for them
    ],
    ids=["chatml", "agents", "alternating", "no system", "tools known"],
)
async def test_a_conversation_with_tools_is_rendered_as_text(template: str, notes: set[str]) -> None:
    tokens = await tokens_of(template, tool_parser="generic")
    found = set[str]()
    text = await prompt_of(tokens, [SYSTEM, HI, CALLED, RESULT], tools=TOOLS, notes=found)
    assert found == notes
    places = [text.index(part) for part in ("Be kind.", PROMPT, "Hi", AS_TEXT, RESULT_AS_TEXT)]
    assert places == sorted(places)
    without = await prompt_of(tokens, [SYSTEM, HI, CALLED, RESULT], notes=set[str]())  # tool_choice "none"
    assert without == text.replace(f"\n\n{PROMPT}", "")
    await tokens.close()


@pytest.mark.parametrize(
    ("template", "strict", "must_call", "optional"),
    [
        (CHATML, False, False, True),  # calls are constrained if the engine supports it
        (CHATML, True, False, False),
        (CHATML, False, True, False),
        (RULES["no rule"], False, False, None),  # the model was trained for its format
        (RULES["no rule"], True, False, False),
    ],
)
def test_the_grammar_of_calls_is_optional(template: str, strict: bool, must_call: bool, optional: bool | None) -> None:
    dialect = Dialect.of(template, {}, knows_tools=template != CHATML)
    assert dialect is not None
    form = AnswerForm(dialect, (Tool("look", {"type": "object"}, is_strict=strict),))
    grammar = form.grammar(must_call=must_call, content=None)
    assert (None if grammar is None else grammar.is_optional) == optional


async def tokens_of(template: str, **parsers: Any) -> ModelTokens:
    usable = await usable_template("m", template, {})
    dialect = Dialect.of(template, {}, knows_tools=usable.rules.tools, **parsers)
    encoder = HuggingFaceEncoder(byte_tokenizer_json())
    return ModelTokens("m", encoder, usable, 100_000, EncoderPool(), dialect=dialect)


async def prompt_of(tokens: ModelTokens, messages: list[dict[str, Any]], **more: Any) -> str:
    given = json.dumps(messages)
    text = await tokens.decode(await tokens.encode_chat(messages, **more))
    assert json.dumps(messages) == given, "the caller's own messages stay as they are"
    return text
