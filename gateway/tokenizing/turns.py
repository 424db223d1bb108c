"""Adapts conversations to what a chat template accepts.

Clients send system messages anywhere, several calls at once, and consecutive messages of one role. Many templates
refuse some of these or silently drop them. ``find_rules`` renders small conversations when the model is loaded, to
find what its template accepts. ``fitted`` then changes each conversation only where the template requires it. Every
change has a name, which is returned to the client.
"""

import hashlib
import json
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Final

from gateway.errors import InvalidParameter

# Names of the changes, for the client.
SYSTEM_JOINED: Final = "system-joined"  # leading system messages became one
SYSTEM_AS_USER: Final = "system-as-user"  # a system message became a user message
TURNS_MERGED: Final = "turns-merged"  # consecutive messages of one role became one
TURN_ADDED: Final = "turn-added"  # a short message was inserted between two that must not be adjacent
TOOLS_AS_TEXT: Final = "tools-as-text"  # calls and results of earlier turns became text
CALLS_SPLIT: Final = "calls-split"  # each of several calls became a message, with its result
TOOLS_DESCRIBED: Final = "tools-described"  # the system message describes the tools
CALL_IDS: Final = "call-ids"  # ids of calls were replaced
REASONING_JOINED: Final = "reasoning-joined"  # content beside reasoning and a call became reasoning

_BETWEEN: Final = "\n\n"
_ACKNOWLEDGED: Final = "OK."  # the assistant's message between the result of a tool and the user's next message
_SHORT_ID_CHARS: Final = 9  # of letters and digits: Mistral's templates take no other ids
_REASONING: Final = ("reasoning_content", "reasoning", "thinking")
_ANY: Final = {"type": "object", "properties": {}}
_CALLED: Final = {"type": "function", "function": {"name": "look", "description": "", "parameters": _ANY}}

Message = Mapping[str, Any]
Render = Callable[[Sequence[Message], Sequence[Message]], Awaitable[str]]  # a conversation and its tools


class Arguments(dict[str, Any]):
    """Arguments of a call: an object that turns into JSON if a template (DeepSeek's) concatenates it with text."""

    def __radd__(self, text: str) -> str:
        return text + json.dumps(self, ensure_ascii=False)


@dataclass(frozen=True)
class TemplateRules:
    """What a template accepts, that is, neither refuses nor drops. All true: the template accepts everything."""

    system: bool = True
    system_before_result: bool = True  # in a conversation that ends with a tool result
    several_systems: bool = True  # at the beginning
    later_system: bool = True
    system_alone: bool = True  # a conversation without a user message
    user_twice: bool = True
    assistant_twice: bool = True
    assistant_first: bool = True
    tools: bool = True  # the template describes the tools
    tool_results: bool = True
    user_after_tool: bool = True
    several_calls: bool = True  # in one message
    long_call_ids: bool = True
    reasoning_beside_content: bool = True  # in a message that calls a tool


AS_IS: Final = TemplateRules()
# For conversations that a template refuses although it accepts the probes.
STRICT: Final = replace(
    TemplateRules(**{rule.name: False for rule in fields(TemplateRules)}), system=True, tool_results=True
)
STRICTEST: Final = replace(STRICT, system=False)


# --- what a template takes --------------------------------------------------------------------------------------------


def _called(numbers: Sequence[int], *, call_id: str = "call{:05}", **more: str) -> dict[str, Any]:
    calls = [
        {
            "id": call_id.format(number),
            "type": "function",
            "function": {"name": "look", "arguments": Arguments({"for": _word(number)})},
        }
        for number in numbers
    ]
    return {"role": "assistant", "content": "", **more, "tool_calls": calls}


def _result(number: int, *, of: int, call_id: str = "call{:05}") -> dict[str, Any]:
    return {"role": "tool", "name": "look", "tool_call_id": call_id.format(of), "content": _word(number)}


def _word(number: int) -> str:
    return f"probe{number}word"


def _said(roles: str) -> list[Message]:
    names = {"s": "system", "u": "user", "a": "assistant"}
    return [{"role": names[role], "content": _word(number)} for number, role in enumerate(roles)]


_LONG_ID: Final = "call_{:024}"
_PLAIN: Final = _said("u")
_TOLD: Final[Message] = {"type": "function", "function": {"name": _word(1), "description": "", "parameters": _ANY}}
_PROBES: Final[dict[str, list[Message]]] = {
    "system": _said("su"),
    "several_systems": _said("ssu"),
    "later_system": _said("suasus"),
    "system_alone": _said("s"),
    "user_twice": _said("uu"),
    "assistant_twice": _said("uaau"),
    "assistant_first": _said("au"),
}
_PROBES_WITH_TOOLS: Final[dict[str, list[Message]]] = {
    "system_before_result": [*_said("su"), _called([2]), _result(3, of=2)],
    "tool_results": [*_PLAIN, _called([1]), _result(2, of=1)],
    "user_after_tool": [*_PLAIN, _called([1]), _result(2, of=1), {"role": "user", "content": _word(3)}],
    "several_calls": [*_PLAIN, _called([1, 2]), _result(3, of=1), _result(4, of=2)],
    "long_call_ids": [*_PLAIN, _called([1], call_id=_LONG_ID), _result(2, of=1, call_id=_LONG_ID)],
    "reasoning_beside_content": [
        *_PLAIN,
        _called([1], **dict.fromkeys(_REASONING, "Hm."), content="I look."),
        _result(2, of=1),
    ],
}


async def find_rules(render: Render) -> TemplateRules:
    """Find what a template accepts. ``render`` renders with it, and raises InvalidParameter if it refuses."""

    async def takes(messages: Sequence[Message], tools: Sequence[Message] = ()) -> bool:
        try:
            text = await render(messages, tools)
        except InvalidParameter:
            return False
        return all(word in text for word in (*_words(messages), *_names(tools)))

    if not await takes(_PLAIN):
        return AS_IS  # the template requires something that no probe has
    found = {rule: await takes(messages) for rule, messages in _PROBES.items()}
    found["tools"] = await takes(_PLAIN, [_TOLD])
    if await takes(_PROBES_WITH_TOOLS["tool_results"], [_CALLED]):
        found |= {rule: await takes(messages, [_CALLED]) for rule, messages in _PROBES_WITH_TOOLS.items()}
    else:
        found["tool_results"] = False
    return TemplateRules(**found)


def _words(messages: Sequence[Message]) -> Iterator[str]:
    """Yield the words of a probe that its rendered text must contain."""
    for message in messages:
        if message["content"].startswith("probe"):
            yield message["content"]
        for call in message.get("tool_calls", ()):
            yield call["function"]["arguments"]["for"]


def _names(tools: Sequence[Message]) -> Iterator[str]:
    yield from (tool["function"]["name"] for tool in tools)


# --- a conversation that a template takes -----------------------------------------------------------------------------


def fitted(messages: Sequence[Message], rules: TemplateRules, notes: set[str]) -> Sequence[Message]:
    """Return a conversation adapted to a template's rules; add the names of the changes to ``notes``."""
    if rules == AS_IS:
        return messages
    for step in _STEPS:
        messages = step(messages, rules, notes)
    return messages


def _systems_placed(messages: Sequence[Message], rules: TemplateRules, notes: set[str]) -> Sequence[Message]:
    """Join leading system messages, and turn unsupported system messages into user messages."""
    count = next((number for number, message in enumerate(messages) if message["role"] != "system"), len(messages))
    leading, rest = list(messages[:count]), messages[count:]
    has_user = any(message["role"] == "user" for message in rest)
    takes_system = rules.system and (rules.system_before_result or (bool(rest) and rest[-1]["role"] == "user"))
    if leading and not (takes_system and (rules.system_alone or has_user)):
        notes.add(SYSTEM_AS_USER)
        text = _joined(leading)
        if rest and rest[0]["role"] == "user":  # the convention of templates without a system role
            rest = [{**rest[0], "content": _joined([{"content": text}, rest[0]])}, *rest[1:]]
            leading = []
        else:
            leading = [{"role": "user", "content": text}]
    elif len(leading) > 1 and not rules.several_systems:
        notes.add(SYSTEM_JOINED)
        leading = [{**leading[0], "content": _joined(leading)}]
    if rules.later_system or all(message["role"] != "system" for message in rest):
        return [*leading, *rest]
    notes.add(SYSTEM_AS_USER)
    return [*leading, *_later_as_user(rest)]


def _later_as_user(messages: Sequence[Message]) -> Iterator[Message]:
    """Yield system messages as user messages in place, so that the cached prompt prefix stays valid.

    Messages between a call and its result are moved after the result.
    """
    waiting: list[Message] = []
    for message in messages:
        if message["role"] == "system":
            waiting.append({"role": "user", "content": f"<system>\n{message['content']}\n</system>"})
            continue
        if message["role"] != "tool":
            yield from waiting
            waiting.clear()
        yield message
    yield from waiting


def _tools_as_text(messages: Sequence[Message], rules: TemplateRules, notes: set[str]) -> Sequence[Message]:
    if rules.tool_results or not any(message["role"] == "tool" or message.get("tool_calls") for message in messages):
        return messages
    notes.add(TOOLS_AS_TEXT)
    return [_as_text(message) for message in messages]


def _as_text(message: Message) -> Message:
    if message["role"] == "tool":
        return {"role": "user", "content": f"<tool_response>\n{message['content']}\n</tool_response>"}
    calls = [json.dumps(call["function"], ensure_ascii=False) for call in message.get("tool_calls", ())]
    if not calls:
        return message
    texts = [{"content": message["content"]}, *({"content": f"<tool_call>\n{call}\n</tool_call>"} for call in calls)]
    return {**{name: value for name, value in message.items() if name != "tool_calls"}, "content": _joined(texts)}


def _calls_split(messages: Sequence[Message], rules: TemplateRules, notes: set[str]) -> Sequence[Message]:
    if rules.several_calls or all(len(message.get("tool_calls", ())) < 2 for message in messages):
        return messages
    notes.add(CALLS_SPLIT)
    split: list[Message] = []
    begin = 0
    while begin < len(messages):
        end = begin + 1
        while end < len(messages) and messages[end]["role"] == "tool":
            end += 1
        split += _call_by_call(messages[begin], messages[begin + 1 : end])
        begin = end
    return split


def _call_by_call(message: Message, results: Sequence[Message]) -> Iterator[Message]:
    """Yield a message; split several calls into one message per call, each followed by its results."""
    calls = message.get("tool_calls", ())
    if len(calls) < 2:
        yield message
        yield from results
        return
    ids = [call["id"] for call in calls]
    for number, call in enumerate(calls):
        yield {**message, "content": "" if number else message["content"], "tool_calls": [call]}
        if ids.index(call["id"]) == number:
            yield from (result for result in results if result.get("tool_call_id") == call["id"])
    yield from (result for result in results if result.get("tool_call_id") not in ids)


def _reasoning_joined(messages: Sequence[Message], rules: TemplateRules, notes: set[str]) -> Sequence[Message]:
    if rules.reasoning_beside_content:
        return messages
    return [_with_joined_reasoning(message, notes) for message in messages]


def _with_joined_reasoning(message: Message, notes: set[str]) -> Message:
    reasoning = message.get("reasoning_content")
    if not (reasoning and message["content"] and message.get("tool_calls")):
        return message
    notes.add(REASONING_JOINED)
    return {**message, "content": "", **dict.fromkeys(_REASONING, _joined([{"content": reasoning}, message]))}


def _short_ids(messages: Sequence[Message], rules: TemplateRules, notes: set[str]) -> Sequence[Message]:
    if rules.long_call_ids:
        return messages
    return [_with_short_ids(message, notes) for message in messages]


def _with_short_ids(message: Message, notes: set[str]) -> Message:
    if calls := message.get("tool_calls"):
        return {**message, "tool_calls": [{**call, "id": _short_id(call["id"], notes)} for call in calls]}
    if "tool_call_id" in message:
        return {**message, "tool_call_id": _short_id(message["tool_call_id"], notes)}
    return message


def _short_id(call_id: str, notes: set[str]) -> str:
    if len(call_id) == _SHORT_ID_CHARS and call_id.isascii() and call_id.isalnum():
        return call_id
    notes.add(CALL_IDS)
    return hashlib.sha256(call_id.encode(errors="surrogatepass")).hexdigest()[:_SHORT_ID_CHARS]


def _turns_alternate(messages: Sequence[Message], rules: TemplateRules, notes: set[str]) -> Sequence[Message]:
    """Merge consecutive messages of one role, and insert a message between roles that must not be adjacent."""
    merges = {"user": not rules.user_twice, "assistant": not rules.assistant_twice}
    turns: list[Message] = []
    for message in messages:
        role, before = message["role"], turns[-1] if turns else None
        is_first = before is None or before["role"] == "system"
        if is_first and role == "assistant" and not rules.assistant_first:
            notes.add(TURN_ADDED)
            turns.append({"role": "user", "content": ""})
        if before is not None and before["role"] == role and merges.get(role):
            notes.add(TURNS_MERGED)
            turns[-1] = _merged(before, message)
            continue
        if before is not None and before["role"] == "tool" and role == "user" and not rules.user_after_tool:
            notes.add(TURN_ADDED)
            turns.append({"role": "assistant", "content": _ACKNOWLEDGED})
        turns.append(message)
    return turns


def _merged(first: Message, second: Message) -> Message:
    merged = {**first, **second, "content": _joined([first, second])}
    for name in _REASONING:
        if name in first and name in second:
            merged[name] = f"{first[name]}{_BETWEEN}{second[name]}"
    if calls := [*first.get("tool_calls", ()), *second.get("tool_calls", ())]:
        merged["tool_calls"] = calls
    return merged


def _joined(messages: Sequence[Message]) -> str:
    return _BETWEEN.join(message["content"] for message in messages if message["content"])


_STEPS: Final = (_systems_placed, _tools_as_text, _calls_split, _reasoning_joined, _short_ids, _turns_alternate)
