"""Formats with each argument between its own tags: strings verbatim, other values as JSON.

The schema determines which arguments are strings. A table of tags describes each family.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from protocol.dialects.arguments import (
    TEXT_OR_NULL,
    alternatives_of,
    as_json,
    inside_string,
    resolved,
    types_of,
    values_of,
)
from protocol.dialects.base import Schemas, Tool
from protocol.dialects.lark import LarkGrammar, literal, one_of
from protocol.dialects.marked import free_text, new_call_id, repeated
from protocol.dialects.source import MAX_HELD_CHARS, Kind, Reading, Source

OPEN: Final = "<tool_call>"
CLOSE: Final = "</tool_call>"
MAX_NAME_CHARS: Final = 256
MAX_NULL_CHARS: Final = 8  # of a null and the white space around it
_TEXT: Final = frozenset({"string"})
_NAME: Final = re.compile(r"[\w.-]+")
_KEY: Final = r"/[^<>\s]{1,64}/"
_BOUNDS_OF_TEXT: Final = frozenset({"pattern", "format", "minLength", "maxLength", "not"})


@dataclass(frozen=True)
class Tags:
    """The tags between ``<tool_call>`` and ``</tool_call>`` in one family.

    The tags before a key and after a value must not be empty.
    """

    before_name: str
    after_name: str  # empty: the name ends with its line or at the next tag
    before_key: str
    after_key: str
    before_value: str
    after_value: str
    after_values: str
    has_lines: bool  # each tag and each value has its own line; otherwise lines are free


class TaggedFormat:
    """Calls with tagged arguments, by one family's tags."""

    reads_reasoning = False

    def __init__(self, tags: Tags) -> None:
        self._tags = tags
        keys_and_values = (tags.before_key, tags.after_key, tags.before_value, tags.after_value)
        self.marks: tuple[str, ...] = (OPEN, CLOSE, *filter(None, keys_and_values))
        # A line end around a value is not part of it if values have their own lines.
        self._ends = ("\n" + tags.after_value, tags.after_value) if tags.has_lines else (tags.after_value,)
        self._line = literal("\n") if tags.has_lines else f"{literal(chr(10))}?"

    def read(self, source: Source, tools: Schemas) -> Reading[None]:
        """Read content and calls of ``tools`` to the end of the text."""
        while (yield from source.pass_until((OPEN,), Kind.CONTENT)):
            name = yield from self._read_name(source)
            if name is None:
                source.give_back(Kind.CONTENT)
                continue
            source.drop()
            source.emit(Kind.CALL, name)
            yield from self._read_arguments(source, tools.get(name, {}))
            has_end = bool(self._tags.after_values) and (yield from source.follows(self._tags.after_values))
            if (yield from source.follows(CLOSE)) or has_end:  # otherwise it was truncated, and its arguments stay open
                source.emit(Kind.ARGUMENTS, "}")
            yield from source.skip_space()

    def call_id(self) -> str:
        """Return a new id for a call."""
        return new_call_id()

    def forced(self, lark: LarkGrammar, tools: Sequence[Tool], *, most: int) -> str:
        """Return an expression for one to ``most`` calls. Raises ValueError for a string argument with bounds."""
        call = lark.rule(f"{lark.mark(OPEN)} {self._after_mark(lark, tools)}")
        return repeated(call, self._line, most)

    def free(self, lark: LarkGrammar, tools: Sequence[Tool], *, most: int) -> str:
        """Return an expression for text with at most ``most`` valid calls. Raises ValueError for a bounded string."""
        return free_text(lark, OPEN, self._after_mark(lark, tools), most)

    def answer(self, lark: LarkGrammar, content: str) -> str:
        """Return an expression for an answer whose content is ``content``."""
        del lark
        return content

    # --- reading ------------------------------------------------------------------------------------------------------

    def _read_name(self, source: Source) -> Reading[str | None]:
        """Peek at a function's name and the tag that ends it; return None if there is no name."""
        tags = self._tags
        if tags.before_name and not (yield from source.follows(tags.before_name)):
            return None
        name = yield from source.until((tags.after_name,) if tags.after_name else ("\n", "<"), MAX_NAME_CHARS)
        if name is None or not _NAME.fullmatch(name.strip()):
            return None
        source.at += len(tags.after_name)
        return name.strip()

    def _read_arguments(self, source: Source, schema: Mapping[str, Any]) -> Reading[None]:
        tags, properties = self._tags, schema.get("properties")
        source.emit(Kind.ARGUMENTS, "{")
        separator = ""
        while (yield from source.follows(tags.before_key)):
            key = yield from source.until((tags.after_key,), MAX_NAME_CHARS)
            if key is None:
                return
            source.at += len(tags.after_key)
            if tags.before_value and not (yield from source.follows(tags.before_value)):
                return
            if tags.has_lines:
                yield from source.skip("\n")
            source.drop()
            key = key.strip()
            source.emit(Kind.ARGUMENTS, f"{separator}{json.dumps(key, ensure_ascii=False)}: ")
            separator = ", "
            yield from self._read_value(source, _types_of_property(properties, key, schema))

    def _read_value(self, source: Source, types: frozenset[str]) -> Reading[None]:
        """Emit one value: a string as it arrives; a truncated value as far as it goes."""
        is_text = "string" in types and types <= TEXT_OR_NULL
        text = None
        if types != _TEXT:
            limit_chars = MAX_NULL_CHARS + len(self._ends[0]) if is_text else MAX_HELD_CHARS
            text = yield from source.until(self._ends, limit_chars)
        if text is not None:
            source.emit(Kind.ARGUMENTS, as_json(text, types))
            yield from source.follows(self._tags.after_value)
        elif is_text:
            source.emit(Kind.ARGUMENTS, '"')
            if (yield from source.pass_until(self._ends, Kind.ARGUMENTS, encode=inside_string)):
                source.emit(Kind.ARGUMENTS, '"')
        source.drop()

    # --- grammar ------------------------------------------------------------------------------------------------------

    def _after_mark(self, lark: LarkGrammar, tools: Sequence[Tool]) -> str:
        tags = self._tags
        calls = [
            f"{literal(tags.before_name + tool.name + tags.after_name)} {self._line} {self._arguments(lark, tool)}"
            for tool in tools
        ]
        before = self._line if tags.before_name else ""
        after = f"{literal(tags.after_values)} {self._line}" if tags.after_values else ""
        return f"{before} {one_of(calls)} {after} {lark.mark(CLOSE)}"

    def _arguments(self, lark: LarkGrammar, tool: Tool) -> str:
        """Return an expression for a tool's arguments in the schema's order; any string arguments if it names none."""
        schema = tool.schema
        if "properties" not in schema and schema.get("additionalProperties") is not False:
            return f"({self._argument(lark, _KEY, self._text(lark))})*"
        required, properties = schema.get("required", ()), schema.get("properties", {})
        if not isinstance(properties, Mapping):
            raise ValueError(f"the properties of {tool.name!r} must be an object")  # noqa: TRY004  # the client's value
        parts = []
        for name, of_value in properties.items():
            part = self._argument(lark, literal(name), self._value(lark, name, of_value, schema))
            parts.append(part if name in required else f"({part})?")
        return " ".join(parts)

    def _argument(self, lark: LarkGrammar, key: str, value: str) -> str:
        tags = self._tags
        before = f"{self._line} {lark.mark(tags.before_value)}" if tags.before_value else self._line
        return f"{lark.mark(tags.before_key)} {key} {lark.mark(tags.after_key)} {before} {value} {self._line}"

    def _value(self, lark: LarkGrammar, name: str, schema: object, root: Mapping[str, Any]) -> str:
        """Return an expression for a value and its end. Raises ValueError for a string with bounds."""
        schema = resolved(schema, root)
        bounds = schema if isinstance(schema, Mapping) else {}
        types = types_of(schema, root)
        if "string" not in types or not types <= TEXT_OR_NULL:
            definitions = {key: root[key] for key in ("$defs", "definitions") if key in root}
            return f"{lark.json({**bounds, **definitions})} {self._end(lark)}"
        if values := values_of(bounds):
            texts = [value if isinstance(value, str) else json.dumps(value) for value in values]
            return f"{one_of([literal(text) for text in texts])} {self._end(lark)}"
        alternatives = alternatives_of(bounds)
        has_parts = "allOf" in bounds and bounds["allOf"] is not alternatives
        if _BOUNDS_OF_TEXT & bounds.keys() or has_parts or (alternatives and "type" in bounds):
            raise ValueError(f"the bounds of the string {name!r} cannot be enforced in this model's calls")
        if alternatives:
            return one_of([self._value(lark, name, alternative, root) for alternative in alternatives])
        return self._text(lark)

    def _text(self, lark: LarkGrammar) -> str:
        return lark.text_until(self._ends[0])

    def _end(self, lark: LarkGrammar) -> str:
        return lark.mark(self._ends[0])


def _types_of_property(properties: object, key: str, root: Mapping[str, Any]) -> frozenset[str]:
    """Return the types of an argument; one missing from the schema is a string."""
    return types_of(properties[key], root) if isinstance(properties, Mapping) and key in properties else _TEXT
