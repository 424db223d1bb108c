"""Qwen 3 Coder and later Qwens: each argument between marks of its own, a text as it is, anything else as JSON.

    <tool_call>
    <function=get_weather>
    <parameter=city>
    Paris
    </parameter>
    </function>
    </tool_call>

The schema says which arguments are texts.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final

from gateway.tools.base import Schemas, Tool
from gateway.tools.lark import LarkGrammar, literal, one_of
from gateway.tools.marked import free_text, new_call_id, repeated
from gateway.tools.source import MAX_HELD_CHARS, Kind, Reading, Source

OPEN: Final = "<tool_call>"
CLOSE: Final = "</tool_call>"
FUNCTION: Final = "<function="
END_OF_FUNCTION: Final = "</function>"
PARAMETER: Final = "<parameter="
END_OF_PARAMETER: Final = "</parameter>"
MAX_NAME_CHARS: Final = 256
_ENDS: Final = ("\n" + END_OF_PARAMETER, END_OF_PARAMETER)  # one line end around a value is not part of it
_PYTHONS: Final = {"True": "true", "False": "false", "None": "null"}
_BOUNDS_OF_TEXT: Final = frozenset({"pattern", "format", "minLength", "maxLength", "allOf", "anyOf", "oneOf", "not"})


class QwenCoderFormat:
    """See the module and ToolFormat."""

    marks: tuple[str, ...] = (OPEN, CLOSE)
    reads_reasoning = False

    def read(self, source: Source, tools: Schemas) -> Reading[None]:
        """See ToolFormat."""
        while (yield from source.pass_until((OPEN,), Kind.CONTENT)):
            name = None
            if (yield from source.follows(FUNCTION)):
                name = yield from source.until((">",), MAX_NAME_CHARS)
            if not name:
                source.give_back(Kind.CONTENT)
                continue
            source.at += 1
            source.drop()
            source.tell(Kind.CALL, name)
            yield from _read_arguments(source, tools.get(name, {}).get("properties", {}))
            has_end = yield from source.follows(END_OF_FUNCTION)
            if (yield from source.follows(CLOSE)) or has_end:  # else it was cut off, and its arguments stay open
                source.tell(Kind.ARGUMENTS, "}")
            yield from source.skip_space()

    def call_id(self) -> str:
        """See ToolFormat."""
        return new_call_id()

    def forced(self, lark: LarkGrammar, tools: Sequence[Tool], *, most: int) -> str:
        """See ToolFormat. Raises ValueError for a text with bounds of its own."""
        call = lark.rule(f"{lark.mark(OPEN)} {_after_mark(lark, tools)}")
        return repeated(call, literal("\n"), most)

    def free(self, lark: LarkGrammar, tools: Sequence[Tool], *, most: int) -> str:
        """See ToolFormat. Raises ValueError for a text with bounds of its own."""
        return free_text(lark, OPEN, _after_mark(lark, tools), most)

    def answer(self, lark: LarkGrammar, content: str) -> str:
        """See ToolFormat."""
        del lark
        return content


def _read_arguments(source: Source, properties: Mapping[str, Any]) -> Reading[None]:
    source.tell(Kind.ARGUMENTS, "{")
    separator = ""
    while (yield from source.follows(PARAMETER)):
        key = yield from source.until((">",), MAX_NAME_CHARS)
        if key is None:
            return
        source.at += 1
        yield from source.skip("\n")
        source.tell(Kind.ARGUMENTS, f"{separator}{json.dumps(key)}: ")
        separator = ", "
        yield from _read_value(source, _types_of(properties.get(key)))


def _types_of(schema: object) -> list[str]:
    """The types that a value may have; none where the schema says so in another way."""
    if not isinstance(schema, Mapping):
        return ["string"]
    types = schema.get("type", [])
    return types if isinstance(types, list) else [types]


def _read_value(source: Source, types: Sequence[str]) -> Reading[None]:
    """Tell one value, a text as it comes, and what of it there is where it is cut off."""
    if list(types) == ["string"]:
        source.tell(Kind.ARGUMENTS, '"')
        if (yield from source.pass_until(_ENDS, Kind.ARGUMENTS, encode=_inside_string)):
            source.tell(Kind.ARGUMENTS, '"')
            source.drop()
        return
    text = yield from source.until(_ENDS, MAX_HELD_CHARS)
    if text is not None:
        source.tell(Kind.ARGUMENTS, _as_json(text, may_be_text="string" in types))
        yield from source.follows(END_OF_PARAMETER)
        source.drop()


def _inside_string(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]


def _as_json(text: str, *, may_be_text: bool) -> str:
    value = _PYTHONS.get(text.strip(), text.strip())
    if not may_be_text or value == "null":
        try:
            json.loads(value)
        except (ValueError, RecursionError):
            pass
        else:
            return value
    return json.dumps(text, ensure_ascii=False)


def _after_mark(lark: LarkGrammar, tools: Sequence[Tool]) -> str:
    calls = [f"{_line(FUNCTION + tool.name + '>')} {_parameters(lark, tool)}" for tool in tools]
    return f"{_line('')} {one_of(calls)} {_line(END_OF_FUNCTION)} {lark.mark(CLOSE)}"


def _line(text: str) -> str:
    return literal(text + "\n")


def _parameters(lark: LarkGrammar, tool: Tool) -> str:
    """An expression for a tool's arguments, in the order of its schema."""
    required = tool.schema.get("required", ())
    shared: dict[str, Any] = {key: tool.schema[key] for key in ("$defs", "definitions") if key in tool.schema}
    parts = []
    for name, schema in tool.schema.get("properties", {}).items():
        part = f"{_line(PARAMETER + name + '>')} {_value(lark, name, schema, shared)}"
        parts.append(part if name in required else f"({part})?")
    return " ".join(parts)


def _value(lark: LarkGrammar, name: str, schema: object, shared: Mapping[str, Any]) -> str:
    """An expression for a value and its end. Raises ValueError for a text with bounds of its own."""
    types = _types_of(schema)
    bounds = schema if isinstance(schema, Mapping) else {}
    if "string" not in types:
        return f"{lark.json({**bounds, **shared})} {_line(_ENDS[0])}"
    if types != ["string"] or _BOUNDS_OF_TEXT & bounds.keys():
        raise ValueError(f"bounds of the text {name!r} cannot be forced in this model's calls")
    texts = [bounds["const"]] if "const" in bounds else bounds.get("enum")
    if texts is not None:
        return f"{one_of([literal(text) for text in texts])} {_line(_ENDS[0])}"
    return f"{lark.text_until(_ENDS[0])} {_line('')}"
