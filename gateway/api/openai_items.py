"""What is kept of a body of Responses: the fields that are known, and the conversation that it goes on with.

Other fields have no meaning here, and a caller may send any amount of them.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import msgspec

from gateway.api.fields import check_values
from gateway.errors import InvalidParameter

USABLE: Final = ("completed", "incomplete")  # the states of a response that another may go on from
TEXT_PARTS: Final = {
    **dict.fromkeys(("input_text", "output_text", "text", "reasoning_text", "summary_text"), "text"),
    "refusal": "refusal",
}
_ITEM_FIELDS: Final[dict[str, tuple[str, ...]]] = {
    "message": ("id", "type", "role", "status", "content"),
    "function_call": ("id", "type", "status", "call_id", "namespace", "name", "arguments"),
    "function_call_output": ("id", "type", "status", "call_id", "output"),
    "custom_tool_call": ("id", "type", "status", "call_id", "namespace", "name", "input"),
    "custom_tool_call_output": ("id", "type", "status", "call_id", "output"),
    "reasoning": ("id", "type", "status", "summary", "content"),
}
# Items of tools that run elsewhere. Of a call: where its result is, if it has one itself.
FOREIGN_CALLS: Final = {
    "local_shell_call": None,
    "shell_call": None,
    "apply_patch_call": None,
    "tool_search_call": None,
    "mcp_call": "output",
    "code_interpreter_call": "outputs",
    "file_search_call": "results",
}
FOREIGN_OUTPUTS: Final = {
    "local_shell_call_output": "output",
    "shell_call_output": "output",
    "apply_patch_call_output": "output",
    "tool_search_output": "tools",
}
FOREIGN_SKIPPED: Final = frozenset(
    {
        "web_search_call", "image_generation_call", "mcp_list_tools", "mcp_approval_request", "mcp_approval_response",
    }
)  # fmt: skip
_LISTS_OF_PARTS: Final = ("content", "output", "summary")
_EMPTY_FIELDS_OF_PARTS: Final = ("annotations", "logprobs")  # clients expect them where they were; ours are empty
_TOOL_FIELDS: Final = ("type", "name", "description", "parameters", "strict", "format")
_NAMESPACE_FIELDS: Final = ("type", "name", "description")
_CHOICE_FIELDS: Final = ("type", "name")
SCHEMA_FIELDS: Final = ("name", "description", "schema", "strict")
_ID_PREFIXES: Final = {
    "message": "msg",
    "function_call": "fc",
    "function_call_output": "fco",
    "custom_tool_call": "ctc",
    "custom_tool_call_output": "ctco",
    "reasoning": "rs",
}

Item = dict[str, Any]
_encode = msgspec.json.Encoder().encode


class _Input(msgspec.Struct):
    input: msgspec.Raw


class _Previous(msgspec.Struct):
    status: str
    output: list[msgspec.Raw]


_decode_input: Final = msgspec.json.Decoder(_Input).decode
_decode_previous: Final = msgspec.json.Decoder(_Previous).decode
_decode_items: Final[Callable[[bytes], str | list[Item]]] = msgspec.json.Decoder(str | list[Item]).decode


def with_history(body: bytes, items: bytes, response: bytes) -> bytes:
    """Put an earlier conversation before the input of a valid body: its input items and its response, as stored.

    Raises InvalidParameter where there is nothing to go on from, and MsgspecError. What they hold stays unparsed.
    """
    param = "previous_response_id"
    previous = _decode_previous(response)
    if previous.status not in USABLE:
        message = f"The previous response is '{previous.status}': there is nothing to go on from."
        raise InvalidParameter(message, param=param)
    if not items:
        raise InvalidParameter("The conversation of the previous response was too large to be kept.", param=param)
    check_values(items, response, param=param)
    fields = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
    given = bytes(fields["input"])
    added = msgspec.json.decode(given, type=list[msgspec.Raw]) if given.startswith(b"[") else [_user_item(given)]
    history = [*msgspec.json.decode(items, type=list[msgspec.Raw]), *previous.output]
    return _encode({**fields, "input": [*history, *added]})


def _user_item(text: bytes) -> msgspec.Raw:
    return msgspec.Raw(b'{"role":"user","content":%b}' % text)


def items_of(body: bytes, answer_id: str) -> bytes:
    """Return the input items of a valid body, as they are stored: JSON. Raises MsgspecError."""
    given = _decode_items(_decode_input(body).input)
    return _encode(stored_items(given, answer_id))


def stored_items(given: str | list[Item], answer_id: str) -> list[Item]:
    """Return input items as they are stored."""
    items: list[Item] = [{"role": "user", "content": given}] if isinstance(given, str) else given
    return [_stored_item(item, f"{answer_id}i{number:04x}") for number, item in enumerate(items)]


def _stored_item(item: Item, identity: str) -> Item:
    """Return an input item as it is stored: with its type, an id, and its content as parts."""
    stored = known_item(item)
    kind = stored["type"]
    stored = {"id": f"{_ID_PREFIXES.get(kind, 'item')}_{identity}", **stored}
    if kind == "message" and isinstance(stored.get("content"), str):
        part = "output_text" if stored.get("role") == "assistant" else "input_text"
        stored["content"] = [{"type": part, "text": stored["content"]}]
    return stored


def known_item(item: Item) -> Item:
    """Return what is known of an item that was translated."""
    kind = item.get("type", "message")
    if kind in FOREIGN_CALLS or kind in FOREIGN_OUTPUTS or kind in FOREIGN_SKIPPED:
        return dict(item)
    known: Item = {"type": kind}
    for name in _ITEM_FIELDS.get(kind, ()):
        value = item.get(name)
        if isinstance(value, list) and name in _LISTS_OF_PARTS:
            known[name] = [_known_part(part) for part in value]
        elif isinstance(value, str):
            known[name] = value
    if kind == "function_call" and "arguments" not in known:  # an object, or null
        known["arguments"] = _encode(item.get("arguments") or {}).decode()
    return known


def _known_part(part: Mapping[str, Any]) -> dict[str, Any]:
    kind = str(part.get("type"))
    text = TEXT_PARTS.get(kind, "text")
    return {"type": kind, text: part.get(text), **{name: [] for name in _EMPTY_FIELDS_OF_PARTS if name in part}}


def known_tool(tool: Item) -> Item:
    """Return what is known of a tool that was translated."""
    if tool.get("type") == "namespace":
        inner = [known_tool(one) for one in tool.get("tools") or ()]
        return {**fields_of(tool, _NAMESPACE_FIELDS), "tools": inner}
    return fields_of(tool, _TOOL_FIELDS)


def known_choice(choice: str | Item) -> str | Item:
    """Return what is known of a choice of tools."""
    return choice if isinstance(choice, str) else fields_of(choice, _CHOICE_FIELDS)


def fields_of(fields: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
    """Return those of some fields that are there."""
    return {name: fields[name] for name in names if name in fields}
