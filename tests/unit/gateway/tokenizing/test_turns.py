"""Client conversations, and templates that refuse or drop parts of them."""

import re
from dataclasses import asdict, replace
from typing import Any

import pytest

from gateway.errors import InvalidParameter
from gateway.tokenizing.cards import usable_template
from gateway.tokenizing.encoder_pool import EncoderPool
from gateway.tokenizing.encoders import HuggingFaceEncoder
from gateway.tokenizing.model_tokens import ModelTokens
from gateway.tokenizing.templates import ChatTemplate
from gateway.tokenizing.turns import AS_IS, Arguments, TemplateRules, fitted
from tests.chat_templates import ALTERNATING_WITH_TOOLS, PUBLISHED, SYSTEM_FIRST
from tests.small_tokenizer import byte_tokenizer_json

REFUSED = {
    "Qwen 3.5": {"several_systems", "later_system", "system_alone"},
    "Qwen 3, GLM 4.6, Kimi K2, Phi 4": set(),
    "Llama 3": {"several_calls"},
    "Gemma 3": {
        "several_systems", "later_system", "system_alone", "user_twice", "assistant_twice", "assistant_first",
        "tools", "tool_results",
    },
    "Gemma 2": {
        "system", "several_systems", "later_system", "system_alone", "user_twice", "assistant_twice", "assistant_first",
        "tools", "tool_results",
    },
    "Mistral": {
        "system_before_result", "several_systems", "later_system", "system_alone", "user_twice", "assistant_twice",
        "assistant_first", "user_after_tool", "long_call_ids",
    },
    "DeepSeek V3": set(),
    "gpt-oss": {"several_systems", "later_system", "several_calls", "reasoning_beside_content"},
    "MiniMax M2": {"several_systems", "later_system"},
}  # fmt: skip
ROLES = {"s": "system", "u": "user", "a": "assistant"}
TOOLS = [{"type": "function", "function": {"name": "look", "description": "", "parameters": {"type": "object"}}}]


def said(roles: str) -> list[dict[str, Any]]:
    """Return messages by letter: c: the assistant calls a tool; d: two tools; r: a result; t: it thinks and calls."""
    messages: list[dict[str, Any]] = []
    called: list[str] = []
    for number, role in enumerate(roles):
        text = f"text{number}."
        if role == "r":
            messages.append({"role": "tool", "tool_call_id": called.pop(0), "content": text})
            continue
        messages.append({"role": ROLES.get(role, "assistant"), "content": text if role in "suat" else ""})
        if role in "cdt":
            called = [f"toolu_{number}{which}_0123456789" for which in range(2 if role == "d" else 1)]
            messages[-1]["tool_calls"] = [
                {
                    "id": call_id,
                    "type": "function",
                    "function": {"name": "look", "arguments": Arguments(at=call_id[-14:])},
                }
                for call_id in called
            ]
        if role == "t":
            messages[-1] |= dict.fromkeys(("reasoning_content", "reasoning", "thinking"), f"thought{number}.")
    return messages


@pytest.mark.parametrize("name", PUBLISHED)
async def test_rules_of_a_template_are_detected(name: str) -> None:
    template = await usable_template("m", PUBLISHED[name], {})
    assert {rule for rule, takes in asdict(template.rules).items() if not takes} == REFUSED[name]
    await closed(template)


async def closed(template: Any) -> None:
    if not isinstance(template, ChatTemplate):
        await template.close()


CONVERSATIONS = (
    "su", "ssu", "sssuau", "sus", "us", "usu", "suasu", "suasus", "s", "ss", "suu", "suaau", "au", "sau", "ucru",
    "sucrsu", "ucsru", "suacra", "udrr", "udrru", "sudsrrsu", "ucrcra", "utr", "utru", "scr", "ssudrrsuas",
)  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
async def test_every_template_accepts_every_conversation(name: str) -> None:
    """Templates like Qwen 3.5's once refused later system messages of coding agents."""
    template = await usable_template("m", PUBLISHED[name], {})
    tokens = ModelTokens("m", HuggingFaceEncoder(byte_tokenizer_json()), template, 100_000, EncoderPool())
    for roles in CONVERSATIONS:
        messages, notes = said(roles), set[str]()
        given = repr(messages)
        text = await tokens.decode(await tokens.encode_chat(messages, tools=TOOLS, notes=notes))
        wanted = [f"text{n}." for n, role in enumerate(roles) if role in "suar" or (role == "t" and name != "Llama 3")]
        wanted += re.findall(r"at': '(\w+)'", given)
        assert {word: text.count(word) for word in wanted} == dict.fromkeys(wanted, 1), (roles, text)
        assert repr(messages) == given, "the caller's own messages stay as they are"
        assert not notes or REFUSED[name], roles
    await closed(template)


def roles_of(messages: Any) -> list[tuple[str, str]]:
    return [(message["role"], message["content"]) for message in messages]


LATER = "<system>\n{}\n</system>"


@pytest.mark.parametrize(
    ("roles", "refused", "turns", "notes"),
    [
        ("ssu", {"several_systems"}, [("system", "text0.\n\ntext1."), ("user", "text2.")], {"system-joined"}),
        ("ssu", {"later_system"}, [("system", "text0."), ("system", "text1."), ("user", "text2.")], set()),
        ("sus", {"later_system"}, [("system", "text0."), ("user", "text1."), ("user", LATER.format("text2."))],
         {"system-as-user"}),
        ("us", {"later_system", "user_twice"}, [("user", "text0.\n\n" + LATER.format("text1."))],
         {"system-as-user", "turns-merged"}),
        ("sucr", {"system_before_result"}, [("user", "text0.\n\ntext1."), ("assistant", ""), ("tool", "text3.")],
         {"system-as-user"}),
        ("sucru", {"system_before_result"}, roles_of(said("sucru")), set()),
        ("su", {"system"}, [("user", "text0.\n\ntext1.")], {"system-as-user"}),
        ("ss", {"system_alone"}, [("user", "text0.\n\ntext1.")], {"system-as-user"}),
        ("sau", {"system"}, [("user", "text0."), ("assistant", "text1."), ("user", "text2.")], {"system-as-user"}),
        ("ucsr", {"later_system"}, [("user", "text0."), ("assistant", ""), ("tool", "text3."),
                                    ("user", LATER.format("text2."))], {"system-as-user"}),
        ("ucru", {"user_after_tool"}, [("user", "text0."), ("assistant", ""), ("tool", "text2."), ("assistant", "OK."),
                                       ("user", "text3.")], {"turn-added"}),
        ("sau", {"assistant_first"}, [("system", "text0."), ("user", ""), ("assistant", "text1."), ("user", "text2.")],
         {"turn-added"}),
        ("udrr", {"several_calls"}, [("user", "text0."), ("assistant", ""), ("tool", "text2."), ("assistant", ""),
                                     ("tool", "text3.")], {"calls-split"}),
        ("ut", {"reasoning_beside_content"}, [("user", "text0."), ("assistant", "")], {"reasoning-joined"}),
        ("uaau", {"assistant_twice"}, [("user", "text0."), ("assistant", "text1.\n\ntext2."), ("user", "text3.")],
         {"turns-merged"}),
        ("ur", {"tool_results"}, [("user", "text0."), ("user", "<tool_response>\ntext1.\n</tool_response>")],
         {"tools-as-text"}),
    ],
)  # fmt: skip
def test_a_conversation_is_fitted_to_the_rules(
    roles: str, refused: set[str], turns: list[tuple[str, str]], notes: set[str]
) -> None:
    messages = (
        said(roles) if roles != "ur" else [*said("u"), {"role": "tool", "tool_call_id": "x", "content": "text1."}]
    )
    told = set[str]()
    found = fitted(messages, replace(AS_IS, **dict.fromkeys(refused, False)), told)
    assert (roles_of(found), told) == (turns, notes)


def test_split_calls_keep_their_results_and_ids() -> None:
    calls = said("udrr")
    calls[2], calls[3] = calls[3], calls[2]  # in a different order
    told = set[str]()
    found = fitted(calls, replace(AS_IS, several_calls=False, long_call_ids=False), told)
    ids = [[call["id"] for call in message.get("tool_calls", ())] or message.get("tool_call_id") for message in found]
    assert ids[1] == [ids[2]]
    assert ids[3] == [ids[4]]
    assert all(re.fullmatch("[a-z0-9]{9}", str(call_id)) for call_id in (ids[2], ids[4]))
    assert (found[2]["content"], found[4]["content"], told) == ("text2.", "text3.", {"calls-split", "call-ids"})
    already = [{"role": "tool", "tool_call_id": "aB3456789", "content": ""}]
    assert fitted(already, TemplateRules(long_call_ids=False), told) == already


def test_reasoning_joins_content_if_the_template_requires_it() -> None:
    [_, joined] = fitted(said("ut"), replace(AS_IS, reasoning_beside_content=False), set())
    assert {joined[name] for name in ("reasoning_content", "reasoning", "thinking")} == {"thought1.\n\ntext1."}


def test_a_new_system_message_keeps_the_prompt_prefix() -> None:
    """Moving it to the front would invalidate the prefix cache."""
    template = ChatTemplate(SYSTEM_FIRST, {})
    rules = TemplateRules(several_systems=False, later_system=False)
    before, after = (
        template.render(fitted(said(roles), rules, set()), add_generation_prompt=False) for roles in ("suau", "suaus")
    )
    assert after.startswith(before)


async def test_an_unexpected_refusal_applies_stricter_rules() -> None:
    source = "{% if messages | length > 2 %}{{ raise_exception('too many') }}{% endif %}" + SYSTEM_FIRST
    template = await usable_template("m", source, {})
    tokens = ModelTokens("m", HuggingFaceEncoder(byte_tokenizer_json()), template, 10_000, EncoderPool())
    notes = set[str]()
    text = await tokens.decode(await tokens.encode_chat(said("suu"), notes=notes))
    assert [f"text{number}." in text for number in range(3)] == [True] * 3
    assert notes == {"turns-merged"}
    notes.clear()
    with pytest.raises(InvalidParameter, match="too many"):
        await tokens.encode_chat(said("uauau"), notes=notes)
    assert not notes


async def test_a_merged_last_message_can_be_continued() -> None:
    template = await usable_template("m", ALTERNATING_WITH_TOOLS, {})
    tokens = ModelTokens("m", HuggingFaceEncoder(byte_tokenizer_json()), template, 10_000, EncoderPool())
    ids = await tokens.encode_chat(said("uaa"), add_generation_prompt=False, continue_final_message=True)
    assert (await tokens.decode(ids)).endswith("text1.\n\ntext2.")
    await closed(template)
