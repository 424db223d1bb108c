"""Keywords of a JSON schema that no grammar can enforce: refused by name, or checked at the end if lenient."""

import json
import re
from collections.abc import Collection
from typing import Any, Final

from gateway.api.schema_check import SchemaCheck
from protocol.grammar import Grammar
from web.errors import InvalidParameter

# What a value must be as a whole, which cannot be said of its beginning (llguidance refuses all of them).
UNENFORCEABLE: Final = frozenset({
    "not", "if", "then", "else", "uniqueItems", "contains", "minContains", "maxContains", "dependentRequired",
    "dependentSchemas", "dependencies", "propertyNames", "unevaluatedProperties", "unevaluatedItems",
})  # fmt: skip
_HARMLESS: Final = {
    "uniqueItems": False,
    "unevaluatedProperties": True,
    "unevaluatedItems": True,
}  # they demand nothing
_OF_SCHEMAS: Final = frozenset({"properties", "patternProperties", "$defs", "definitions"})  # by name
_LISTS: Final = frozenset({"anyOf", "oneOf", "allOf", "prefixItems", "items"})
_SCHEMAS: Final = frozenset({"items", "additionalProperties", "additionalItems"})
_PERHAPS: Final = re.compile("|".join(f'"{word}"' for word in sorted(UNENFORCEABLE)))


def enforceable(grammar: Grammar | None, check: SchemaCheck | None) -> Grammar | None:
    """The grammar without what none can enforce: ``check`` gets that. Raises InvalidParameter where it is None."""
    if grammar is None or grammar.kind != "json_schema" or not _PERHAPS.search(grammar.source):
        return grammar
    try:
        schema = json.loads(grammar.source)
    except (ValueError, RecursionError):  # the engine says what is wrong with it
        return grammar
    kept = enforceable_schema(schema, grammar.field, check)
    return Grammar(grammar.kind, json.dumps(kept), grammar.field)


def enforceable_schema(
    schema: Any,  # noqa: ANN401  # as it came
    field: str,
    check: SchemaCheck | None,
    tool: str | None = None,
) -> Any:  # noqa: ANN401
    """The same of a schema; ``field`` of the request holds it. ``tool``: whose arguments it is of."""
    left_out: set[str] = set()
    try:
        kept = _kept(schema, left_out)
    except RecursionError as error:
        raise InvalidParameter(f"The schema in '{field}' is nested too deeply.", param=field) from error
    if left_out and check is None:
        raise InvalidParameter(_refusal(left_out), param=field, code="unsupported_schema_keyword")
    if left_out and check is not None:
        check.add(schema, tool)
    return kept


def _refusal(words: Collection[str]) -> str:
    named = ", ".join(f"'{word}'" for word in sorted(words))
    return (
        f"The schema's {named} cannot be enforced while an answer is made. Leave it out, or have the operator set"
        " lenient_schemas for this model: then answers are made without, and checked."
    )


def _kept(schema: Any, left_out: set[str]) -> Any:  # noqa: ANN401
    if not isinstance(schema, dict):
        return schema
    kept: dict[str, Any] = {}
    for word, value in schema.items():
        if word in UNENFORCEABLE:
            if word not in _HARMLESS or value is not _HARMLESS[word]:
                left_out.add(word)
        elif word in _OF_SCHEMAS and isinstance(value, dict):
            kept[word] = {name: _kept(one, left_out) for name, one in value.items()}
        elif word in _LISTS and isinstance(value, list):
            kept[word] = [_kept(one, left_out) for one in value]
        else:
            kept[word] = _kept(value, left_out) if word in _SCHEMAS else value
    return kept
