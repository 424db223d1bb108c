"""Keywords of a JSON schema that no grammar can enforce: refused by name, or checked at the end if lenient."""

import json
from typing import Any

from gateway.api.schema_check import SchemaCheck
from gateway.errors import InvalidParameter
from gateway.tokenizing.schema_keywords import SchemaReader
from protocol.generation import Grammar


def enforceable(grammar: Grammar | None, check: SchemaCheck | None) -> Grammar | None:
    """The grammar without what none can enforce: ``check`` gets that. Raises InvalidParameter where it is None."""
    if grammar is None or grammar.kind != "json_schema":
        return grammar
    try:
        schema = json.loads(grammar.source)
    except (ValueError, RecursionError):  # the engine says what is wrong with it
        return grammar
    kept = enforceable_schema(schema, SchemaReader(grammar.field, grammar.field), check)
    return grammar if kept == schema else Grammar(grammar.kind, json.dumps(kept), grammar.field)


def enforceable_schema(
    schema: Any,  # noqa: ANN401  # as it came
    reader: SchemaReader,
    check: SchemaCheck | None,
    tool: str | None = None,
) -> Any:  # noqa: ANN401
    """The same of a schema, read by ``reader``. ``tool``: whose arguments it is of."""
    kept = reader.read(schema)
    if reader.left_out and check is None:
        param = reader.param or min(reader.left_out.values())
        raise InvalidParameter(_refusal(reader.left_out), param=param, code="unsupported_schema_keyword")
    if reader.left_out and check is not None:
        check.add(schema, tool)
    return kept


def _refusal(words: dict[str, str]) -> str:
    named = ", ".join(f"'{word}' (at {words[word]})" for word in sorted(words))
    return (
        f"The schema's {named} cannot be enforced while an answer is made. Leave it out, or have the operator set"
        " lenient_schemas for this model: then answers are made without, and checked."
    )
