"""Unquoted arguments of tool calls: text or JSON, by the argument's schema."""

import json
from collections.abc import Mapping
from typing import Any, Final

MAX_REFERENCES: Final = 8  # length of a chain of references
MAX_SCHEMAS: Final = 64  # visited for one argument: alternatives may nest, even in themselves
_PYTHONS: Final = {"True": "true", "False": "false", "None": "null"}
_TYPES: Final = {
    bool: "boolean", int: "integer", float: "number", str: "string", list: "array", dict: "object", type(None): "null",
}  # fmt: skip
TEXT_OR_NULL: Final = frozenset({"string", "null"})


def resolved(schema: object, root: Mapping[str, Any], left: int = MAX_REFERENCES) -> object:
    """Follow a schema's reference within ``root``; return it unchanged if it has none or the target is missing."""
    reference = schema.get("$ref") if isinstance(schema, Mapping) else None
    if not isinstance(reference, str) or not reference.startswith("#/") or not left:
        return schema
    target: object = root
    for part in reference[2:].split("/"):
        target = target.get(part.replace("~1", "/").replace("~0", "~")) if isinstance(target, Mapping) else None
    return schema if target is None else resolved(target, root, left - 1)


def types_of(schema: object, root: Mapping[str, Any]) -> frozenset[str]:
    """Return the JSON Schema types that a value may have; none if unspecified."""
    types: set[str] = set()
    waiting = [schema]
    for _ in range(MAX_SCHEMAS):
        if not waiting:
            return frozenset(types)
        one = resolved(waiting.pop(), root)
        if not isinstance(one, Mapping):
            break
        its_types = one.get("type")
        if isinstance(its_types, str):
            types.add(its_types)
        elif isinstance(its_types, list):
            types.update(map(str, its_types))
        elif values := values_of(one):
            types.update(_TYPES[type(value)] for value in values)
        elif alternatives := alternatives_of(one):
            waiting += alternatives
        else:
            break
    return frozenset()


def values_of(schema: Mapping[str, Any]) -> list[Any]:
    """Return the values that a schema enumerates (``enum`` or ``const``), if any."""
    if "const" in schema:
        return [schema["const"]]
    values = schema.get("enum")
    return values if isinstance(values, list) else []


def alternatives_of(schema: Mapping[str, Any]) -> list[object]:
    """Return a schema's alternatives (``anyOf``, ``oneOf``), or the single part of an ``allOf``."""
    parts = schema.get("allOf")
    if isinstance(parts, list) and len(parts) == 1:
        return parts
    alternatives = schema.get("anyOf", schema.get("oneOf"))
    return alternatives if isinstance(alternatives, list) else []


def as_json(text: str, types: frozenset[str]) -> str:
    """Return the JSON of a value written as ``text``; a string if it has none of ``types``."""
    value = _PYTHONS.get(text.strip(), text.strip())
    type_ = _type_of(value)
    if "string" not in types:
        is_json = type_ is not None
    elif types <= TEXT_OR_NULL:
        is_json = type_ == "null" and "null" in types
    else:
        is_json = type_ in types or (type_ == "integer" and "number" in types)
    return value if is_json else json.dumps(text, ensure_ascii=False)


def inside_string(text: str) -> str:
    """Escape a part of a text for use inside a JSON string."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


def _type_of(value: str) -> str | None:
    """Return the type of a JSON text; None if it is not valid JSON."""
    try:
        return _TYPES[type(json.loads(value, parse_constant=_refuse))]
    except (ValueError, RecursionError):
        return None


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")
