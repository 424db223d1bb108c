"""One argument of a call that a family writes without quotes: as a text or as JSON, by its schema."""

import json
from collections.abc import Mapping
from typing import Any, Final

MAX_REFERENCES: Final = 8  # that are followed from one to the next
MAX_SCHEMAS: Final = 64  # that are looked at for one argument: alternatives may have alternatives, even themselves
_PYTHONS: Final = {"True": "true", "False": "false", "None": "null"}
_TYPES: Final = {
    bool: "boolean", int: "integer", float: "number", str: "string", list: "array", dict: "object", type(None): "null",
}  # fmt: skip
TEXT_OR_NULL: Final = frozenset({"string", "null"})


def resolved(schema: object, root: Mapping[str, Any], left: int = MAX_REFERENCES) -> object:
    """A schema, or the one within ``root`` that it only refers to; as it is where there is none."""
    reference = schema.get("$ref") if isinstance(schema, Mapping) else None
    if not isinstance(reference, str) or not reference.startswith("#/") or not left:
        return schema
    target: object = root
    for part in reference[2:].split("/"):
        target = target.get(part.replace("~1", "/").replace("~0", "~")) if isinstance(target, Mapping) else None
    return schema if target is None else resolved(target, root, left - 1)


def types_of(schema: object, root: Mapping[str, Any]) -> frozenset[str]:
    """The types that a value may have, by their names in JSON Schema; none where that is not said."""
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
    """The only values that a schema allows, where it lists them."""
    if "const" in schema:
        return [schema["const"]]
    values = schema.get("enum")
    return values if isinstance(values, list) else []


def alternatives_of(schema: Mapping[str, Any]) -> list[object]:
    """The schemas of which a value follows one, where it is said so; also the only part of a schema."""
    parts = schema.get("allOf")
    if isinstance(parts, list) and len(parts) == 1:
        return parts
    alternatives = schema.get("anyOf", schema.get("oneOf"))
    return alternatives if isinstance(alternatives, list) else []


def as_json(text: str, types: frozenset[str]) -> str:
    """The JSON of a value that was written as ``text``; a string, where it is none of its types."""
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
    """A part of a text, as it stands between the quotes of a JSON string."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


def _type_of(value: str) -> str | None:
    """The type of a JSON text; None if it is none."""
    try:
        return _TYPES[type(json.loads(value, parse_constant=_refuse))]
    except (ValueError, RecursionError):
        return None


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is no JSON")
