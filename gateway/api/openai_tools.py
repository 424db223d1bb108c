"""Tools of Responses as chats have them, and items of earlier calls.

A ``custom`` tool takes a text: for the model it is a function with one text. Tools that only a hosted service can run
are left out, and their earlier calls and results are told as those of functions of that name.
"""

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

from gateway.api.fields import refuse_fields
from gateway.api.openai_items import FOREIGN_CALLS, FOREIGN_OUTPUTS, FOREIGN_SKIPPED, TEXT_PARTS, Item
from gateway.errors import InvalidParameter
from protocol.dialects.calls import arguments_of

NAMESPACE_MARK: Final = "__"  # between a namespace and the name of a tool in it
INPUT: Final = "input"  # the argument of a custom tool's function
MAX_SKIPPED_NAMES: Final = 16  # in the header
_NAME: Final = re.compile(r"[a-z0-9_]{1,64}")
_UNSUPPORTED: Final[dict[str, tuple[Any, ...]]] = {"async": (False,), "allowed_callers": (["direct"],)}
_TYPES: Final = {
    "description": (str, "a string"),
    "parameters": (dict, "an object"),
    "strict": (bool, "true or false"),
}
_OF_CUSTOM: Final = {"description": (str, "a string"), "format": (dict, "an object")}
_FORMAT_TEXTS: Final = ("syntax", "definition")  # of a custom tool's grammar
_PARAMETERS_OF_CUSTOM: Final = {
    "type": "object",
    "properties": {INPUT: {"type": "string"}},
    "required": [INPUT],
    "additionalProperties": False,
}
_NO_ARGUMENTS: Final = frozenset({"id", "type", "status", "call_id", "output", "outputs", "results", "name", "caller"})


class ToldTool(NamedTuple):
    """How a tool is told to the client."""

    name: str
    namespace: str | None = None
    is_custom: bool = False

    def item(self, call_id: str) -> Item:
        """Return the item of a call that begins."""
        kind = {"type": "custom_tool_call"} if self.is_custom else {"type": "function_call"}
        named = {} if self.namespace is None else {"namespace": self.namespace}
        return {**kind, "call_id": call_id, "name": self.name, self.field: "", **named}

    @property
    def field(self) -> str:
        """The item's field for what the model wrote."""
        return INPUT if self.is_custom else "arguments"


class ToolList:
    """The tools of one request."""

    def __init__(self, tools: Sequence[Item], adapted: set[str]) -> None:
        """Translate tools; add the names of those that are skipped to ``adapted``. Raises InvalidParameter."""
        self.told: dict[str, ToldTool] = {}  # by the names that the model knows
        self._adapted = adapted
        self.functions = [
            function for number, tool in enumerate(tools) for function in self._of(tool, f"tools.{number}")
        ]

    def _of(self, tool: Item, param: str) -> Iterator[dict[str, Any]]:
        if tool.get("type") != "namespace":
            yield from self._one(tool, param, None)
            return
        space = text_of(tool, "name", param)
        for number, inner in enumerate(listed(tool, "tools", param)):
            where = f"{param}.tools.{number}"
            if not isinstance(inner, Mapping):
                raise InvalidParameter(f"'{where}' must be an object.", param=where, code="invalid_type")
            yield from self._one(inner, where, space)

    def _one(self, tool: Mapping[str, Any], param: str, space: str | None) -> Iterator[dict[str, Any]]:
        kind = text_of(tool, "type", param)
        if kind not in {"function", "custom"}:
            note_skipped(self._adapted, "tool", kind)
            return
        name = text_of(tool, "name", param)
        flat = name if space is None else f"{space}{NAMESPACE_MARK}{name}"
        self.told[flat] = ToldTool(name, space, is_custom=kind == "custom")
        yield _custom(tool, param, flat) if kind == "custom" else _function(tool, param, flat)

    def choice(self, choice: str | Item | None) -> object:
        """Return a ``tool_choice`` as chats have it. Raises InvalidParameter."""
        if choice is None or isinstance(choice, str):
            return choice
        if choice.get("type") not in ("function", "custom"):  # no set: anything may stand there
            message = f"'tool_choice' of type '{choice.get('type')}' is not supported."
            raise InvalidParameter(message, param="tool_choice.type", code="unsupported_parameter")
        return {"type": "function", "function": {"name": text_of(choice, "name", "tool_choice")}}


def note_skipped(adapted: set[str], what: str, kind: str) -> None:
    """Note that a tool or an item was left out."""
    name = f"{what}-skipped:{kind if _NAME.fullmatch(kind) else 'other'}"
    if name in adapted or len(adapted) < MAX_SKIPPED_NAMES:
        adapted.add(name)


def custom_input(arguments: str) -> str:
    """Return the text that a model wrote for a custom tool."""
    given = (arguments_of(arguments) or {}).get(INPUT)
    return given if isinstance(given, str) else arguments


def foreign_messages(item: Item, param: str, adapted: set[str]) -> Iterable[dict[str, Any]] | None:
    """Return the messages of an item of a tool that runs elsewhere; None if it is no such item."""
    kind = str(item.get("type"))
    if kind in FOREIGN_SKIPPED:
        note_skipped(adapted, "item", kind)
        return ()
    call_id = str(item.get("call_id") or item.get("id") or "")
    if kind in FOREIGN_OUTPUTS:
        return (_result(call_id, item.get(FOREIGN_OUTPUTS[kind])),)
    if kind not in FOREIGN_CALLS:
        return None
    name = text_of(item, "name", param) if kind == "mcp_call" else kind.removesuffix("_call")
    given = {field: value for field, value in item.items() if field not in _NO_ARGUMENTS and value is not None}
    arguments = given["arguments"] if set(given) == {"arguments"} else given
    function = {"name": name, "arguments": arguments}
    call = {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": call_id, "type": "function", "function": function}],
    }
    field = FOREIGN_CALLS[kind]
    return (call,) if field is None else (call, _result(call_id, item.get(field) or item.get("error")))


def _result(call_id: str, output: object) -> dict[str, Any]:
    text = output if isinstance(output, str) else json.dumps(output, ensure_ascii=False)
    return {"role": "tool", "tool_call_id": call_id, "content": text}


def _custom(tool: Mapping[str, Any], param: str, name: str) -> dict[str, Any]:
    _check(tool, _OF_CUSTOM, param)
    grammar = tool.get("format") or {}
    texts = [grammar.get(field) for field in _FORMAT_TEXTS]
    description = tool.get("description")
    if grammar.get("type") == "grammar" and all(isinstance(text, str) for text in texts):  # told, not forced
        rule = f"The input follows this {texts[0]} grammar:\n{texts[1]}"
        description = rule if description is None else f"{description}\n\n{rule}"
    return {
        "type": "function",
        "function": {"name": name, "description": description, "parameters": _PARAMETERS_OF_CUSTOM},
    }


def _function(tool: Mapping[str, Any], param: str, name: str) -> dict[str, Any]:
    _check(tool, _TYPES, param)
    return {"type": "function", "function": {"name": name, **{field: tool.get(field) for field in _TYPES}}}


def _check(tool: Mapping[str, Any], types: Mapping[str, tuple[type, str]], param: str) -> None:
    refuse_fields(tool, _UNSUPPORTED, f"{param}.")
    for field, (kind, what) in types.items():
        if tool.get(field) is not None and not isinstance(tool[field], kind):
            where = f"{param}.{field}"
            raise InvalidParameter(f"'{where}' must be {what}.", param=where, code="invalid_type")


def text_of(fields: Mapping[str, Any], name: str, param: str) -> str:
    """Return a field that must be text. Raises InvalidParameter."""
    value = fields.get(name)
    if not isinstance(value, str):
        raise InvalidParameter(f"'{param}.{name}' must be a string.", param=f"{param}.{name}", code="invalid_type")
    return value


def listed(fields: Mapping[str, Any], name: str, param: str) -> list[Any]:
    """Return a field that must be a list, or be left out. Raises InvalidParameter."""
    value = fields.get(name)
    if value is not None and not isinstance(value, list):
        raise InvalidParameter(f"'{param}.{name}' must be a list.", param=f"{param}.{name}", code="invalid_type")
    return value or []


def content_of(content: object, param: str) -> str:
    """Return text, or the texts of parts. Raises InvalidParameter, which names what is neither."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise InvalidParameter(f"'{param}' must be a string or a list of parts.", param=param, code="invalid_type")
    texts = []
    for number, part in enumerate(content):
        where = f"{param}.{number}"
        if not isinstance(part, Mapping):
            raise InvalidParameter(f"'{where}' must be an object.", param=where, code="invalid_type")
        field = TEXT_PARTS.get(str(part.get("type")))
        if field is None:
            message = f"'{where}' is of type '{part.get('type')}', which is not supported here."
            raise InvalidParameter(message, param=f"{where}.type", code="unsupported_parameter")
        texts.append(text_of(part, field, where))
    return "\n".join(texts)
