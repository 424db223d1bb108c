"""Translation of Responses items and tools to chat messages and functions."""

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

import msgspec

from gateway.api.fields import refuse_fields
from gateway.api.values import check_values
from gateway.errors import InvalidParameter
from protocol.dialects.calls import arguments_of

# --- openai items -----------------------------------------------------------------------------------------------------
#
# The stored form of a Responses body: its known fields and the conversation that it continues.
#
# Unknown fields are dropped: a client can send any amount of them.

USABLE: Final = ("completed", "incomplete")  # statuses of a response that can be continued
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
# Items of tools that another service runs. For a call that contains its result: the field of the result.
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
_EMPTY_FIELDS_OF_PARTS: Final = ("annotations", "logprobs")  # clients expect these fields; they are always empty
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
    """Prepend a stored conversation (input items and response) to the input of a valid body.

    The items stay unparsed. Raises MsgspecError, and InvalidParameter if the response cannot be continued.
    """
    param = "previous_response_id"
    previous = _decode_previous(response)
    if previous.status not in USABLE:
        message = f"The previous response is '{previous.status}'. It cannot be continued."
        raise InvalidParameter(message, param=param)
    if not items:
        raise InvalidParameter("The conversation of the previous response was too large to store.", param=param)
    check_values(items, response, param=param)
    fields = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
    given = bytes(fields["input"])
    added = msgspec.json.decode(given, type=list[msgspec.Raw]) if given.startswith(b"[") else [_user_item(given)]
    history = [*msgspec.json.decode(items, type=list[msgspec.Raw]), *previous.output]
    return _encode({**fields, "input": [*history, *added]})


def _user_item(text: bytes) -> msgspec.Raw:
    return msgspec.Raw(b'{"role":"user","content":%b}' % text)


def items_of(body: bytes, answer_id: str) -> bytes:
    """Return the input items of a valid body in stored form (JSON). Raises MsgspecError."""
    given = _decode_items(_decode_input(body).input)
    return _encode(stored_items(given, answer_id))


def stored_items(given: str | list[Item], answer_id: str) -> list[Item]:
    """Return input items in stored form."""
    items: list[Item] = [{"role": "user", "content": given}] if isinstance(given, str) else given
    return [_stored_item(item, f"{answer_id}i{number:04x}") for number, item in enumerate(items)]


def _stored_item(item: Item, identity: str) -> Item:
    """Return an input item in stored form: with a type, an id, and its content as parts."""
    stored = known_item(item)
    kind = stored["type"]
    stored = {"id": f"{_ID_PREFIXES.get(kind, 'item')}_{identity}", **stored}
    if kind == "message" and isinstance(stored.get("content"), str):
        part = "output_text" if stored.get("role") == "assistant" else "input_text"
        stored["content"] = [{"type": part, "text": stored["content"]}]
    return stored


def known_item(item: Item) -> Item:
    """Return the known fields of a translated item."""
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
    """Return the known fields of a translated tool."""
    if tool.get("type") == "namespace":
        inner = [known_tool(one) for one in tool.get("tools") or ()]
        return {**fields_of(tool, _NAMESPACE_FIELDS), "tools": inner}
    return fields_of(tool, _TOOL_FIELDS)


def known_choice(choice: str | Item) -> str | Item:
    """Return the known fields of a tool choice."""
    return choice if isinstance(choice, str) else fields_of(choice, _CHOICE_FIELDS)


def fields_of(fields: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
    """Return the fields that are present, of these names."""
    return {name: fields[name] for name in names if name in fields}


# --- openai tools -----------------------------------------------------------------------------------------------------
#
# Responses tools and items of earlier calls in chat format.
#
# A ``custom`` tool takes text: for the model it is a function with one text argument. Hosted tools are omitted, and
# their earlier calls and results become those of functions with their names.

NAMESPACE_MARK: Final = "__"  # between a namespace and the name of a tool in it
INPUT: Final = "input"  # the argument of a custom tool's function
MAX_SKIPPED_NAMES: Final = 16  # in the response header
_NAME: Final = re.compile(r"[a-z0-9_]{1,64}")
_UNSUPPORTED: Final[dict[str, tuple[Any, ...]]] = {"async": (False,), "allowed_callers": (["direct"],)}
_TYPES: Final = {
    "description": (str, "a string"),
    "parameters": (dict, "an object"),
    "strict": (bool, "true or false"),
}
_OF_CUSTOM: Final = {"description": (str, "a string"), "format": (dict, "an object")}
_FORMAT_TEXTS: Final = ("syntax", "definition")  # fields of a custom tool's grammar
_PARAMETERS_OF_CUSTOM: Final = {
    "type": "object",
    "properties": {INPUT: {"type": "string"}},
    "required": [INPUT],
    "additionalProperties": False,
}
_NO_ARGUMENTS: Final = frozenset({"id", "type", "status", "call_id", "output", "outputs", "results", "name", "caller"})


class ClientTool(NamedTuple):
    """How a tool is presented to the client."""

    name: str
    namespace: str | None = None
    is_custom: bool = False

    def item(self, call_id: str) -> Item:
        """Return the item of a new call."""
        kind = {"type": "custom_tool_call"} if self.is_custom else {"type": "function_call"}
        named = {} if self.namespace is None else {"namespace": self.namespace}
        return {**kind, "call_id": call_id, "name": self.name, self.field: "", **named}

    @property
    def field(self) -> str:
        """Name of the item's field for the model's text."""
        return INPUT if self.is_custom else "arguments"


class ToolList:
    """The tools of one request."""

    def __init__(self, tools: Sequence[Item], adapted: set[str]) -> None:
        """Translate tools; add the names of skipped tools to ``adapted``. Raises InvalidParameter."""
        self.shown: dict[str, ClientTool] = {}  # by the model's name of the tool
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
        self.shown[flat] = ClientTool(name, space, is_custom=kind == "custom")
        yield _custom(tool, param, flat) if kind == "custom" else _function(tool, param, flat)

    def choice(self, choice: str | Item | None) -> object:
        """Return a ``tool_choice`` in chat format. Raises InvalidParameter."""
        if choice is None or isinstance(choice, str):
            return choice
        if choice.get("type") not in ("function", "custom"):  # not a set: the value may be unhashable
            message = f"'tool_choice' of type '{choice.get('type')}' is not supported."
            raise InvalidParameter(message, param="tool_choice.type", code="unsupported_parameter")
        return {"type": "function", "function": {"name": text_of(choice, "name", "tool_choice")}}


def note_skipped(adapted: set[str], what: str, kind: str) -> None:
    """Note that a tool or an item was left out."""
    name = f"{what}-skipped:{kind if _NAME.fullmatch(kind) else 'other'}"
    if name in adapted or len(adapted) < MAX_SKIPPED_NAMES:
        adapted.add(name)


def custom_input(arguments: str) -> str:
    """Return the model's input text of a custom tool."""
    given = (arguments_of(arguments) or {}).get(INPUT)
    return given if isinstance(given, str) else arguments


def foreign_messages(item: Item, param: str, adapted: set[str]) -> Iterable[dict[str, Any]] | None:
    """Return the messages of an item of a tool that another service runs; None for other items."""
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
    if grammar.get("type") == "grammar" and all(
        isinstance(text, str) for text in texts
    ):  # described in the prompt, not enforced
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
    """Return a required text field. Raises InvalidParameter."""
    value = fields.get(name)
    if not isinstance(value, str):
        raise InvalidParameter(f"'{param}.{name}' must be a string.", param=f"{param}.{name}", code="invalid_type")
    return value


def listed(fields: Mapping[str, Any], name: str, param: str) -> list[Any]:
    """Return an optional list field. Raises InvalidParameter."""
    value = fields.get(name)
    if value is not None and not isinstance(value, list):
        raise InvalidParameter(f"'{param}.{name}' must be a list.", param=f"{param}.{name}", code="invalid_type")
    return value or []


def content_of(content: object, param: str) -> str:
    """Return the text of a string or list of text parts. Raises InvalidParameter."""
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
