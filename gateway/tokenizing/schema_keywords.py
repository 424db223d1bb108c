"""Prepares a client's JSON schema for the grammar engine: drops annotations and refuses unsupported parts by path.

``format`` is an annotation in JSON Schema: unknown formats are dropped. The grammar engine reads numbers as doubles, so
integers beyond 2^53 are refused: they would be enforced inexactly.
"""

from dataclasses import dataclass, field
from typing import Any, Final

import jsonschema_rs

from gateway.errors import InvalidParameter

# Constraints on a complete value, which cannot be enforced token by token (llguidance refuses all of them).
UNENFORCEABLE: Final = frozenset({
    "not", "if", "then", "else", "uniqueItems", "contains", "minContains", "maxContains", "dependentRequired",
    "dependentSchemas", "dependencies", "propertyNames", "unevaluatedProperties", "unevaluatedItems",
})  # fmt: skip
ENFORCED_FORMATS: Final = frozenset({
    "date-time", "date", "time", "duration", "email", "hostname", "ipv4", "ipv6", "uri", "uuid",
})  # fmt: skip
TYPES: Final = frozenset({"array", "boolean", "integer", "null", "number", "object", "string"})
MAX_EXACT_INTEGER: Final = 2**53
MAX_CHECKED_PATTERN_CHARS: Final = 1_000  # longer patterns are left to the engine, whose compiler can be killed
PATTERN_BYTES: Final = 1_048_576  # of a compiled pattern
_ENGINE_OPTIONS: Final = "x-guidance"  # llguidance's options: whitespace must stay bounded
_HARMLESS: Final = {
    "uniqueItems": False,
    "unevaluatedProperties": True,
    "unevaluatedItems": True,
}  # keywords without effect
_OF_SCHEMAS: Final = frozenset({"properties", "patternProperties", "$defs", "definitions"})  # by name
_LISTS: Final = frozenset({"anyOf", "oneOf", "allOf", "prefixItems", "items"})
_SCHEMAS: Final = frozenset({"items", "additionalProperties", "additionalItems"})
_NUMBERS: Final = frozenset({
    "const", "enum", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf",
})  # fmt: skip


@dataclass(slots=True)
class SchemaReader:
    """Reads the schema at ``path`` of the request. Errors have ``param``, or their own path if it is None."""

    path: str
    param: str | None = None
    left_out: dict[str, str] = field(default_factory=dict)  # unenforceable keywords, with the path of the first use

    def read(self, schema: Any) -> Any:  # noqa: ANN401  # a schema, as it came
        """Return the schema without unenforceable keywords. Raises InvalidParameter."""
        try:
            return self._kept(schema, self.path)
        except RecursionError as error:
            param = self.param or self.path
            raise InvalidParameter(f"The schema in '{param}' is nested too deeply.", param=param) from error

    def _kept(self, schema: Any, path: str) -> Any:  # noqa: ANN401
        if not isinstance(schema, dict):
            return schema
        kept: dict[str, Any] = {}
        for word, value in schema.items():
            here = f"{path}.{word}"
            if word in UNENFORCEABLE:
                if word not in _HARMLESS or value is not _HARMLESS[word]:
                    self.left_out.setdefault(word, here)
            elif word in _OF_SCHEMAS and isinstance(value, dict):
                kept[word] = {name: self._kept(one, f"{here}.{name}") for name, one in value.items()}
            elif word in _LISTS and isinstance(value, list):
                kept[word] = [self._kept(one, f"{here}.{at}") for at, one in enumerate(value)]
            elif word in _SCHEMAS:
                kept[word] = self._kept(value, here)
            elif word == _ENGINE_OPTIONS or (word == "format" and value not in ENFORCED_FORMATS):
                continue
            else:
                self._check(word, value, here)
                kept[word] = value
        return kept

    def _check(self, word: str, value: Any, path: str) -> None:  # noqa: ANN401
        if word == "pattern" and isinstance(value, str) and (reason := _pattern_error(value)):
            self._refuse(path, f"is not a supported regular expression: {reason}")
        if word == "type":
            names = value if isinstance(value, list) else [value]
            if not all(isinstance(name, str) and name in TYPES for name in names):
                self._refuse(path, f"must be one of {', '.join(sorted(TYPES))}, or a list of them")
        if word in _NUMBERS and _has_inexact_integer(value):
            self._refuse(path, "has an integer beyond 2^53, which cannot be enforced exactly. Use a string")

    def _refuse(self, path: str, reason: str) -> None:
        raise InvalidParameter(f"'{path}' {reason}.", param=self.param or path)


def _has_inexact_integer(value: Any) -> bool:  # noqa: ANN401
    if isinstance(value, dict):
        return any(map(_has_inexact_integer, value.values()))
    if isinstance(value, list):
        return any(map(_has_inexact_integer, value))
    return isinstance(value, int) and abs(value) > MAX_EXACT_INTEGER


def _pattern_error(pattern: str) -> str:
    """Return a short reason why a pattern is invalid; empty if it is valid."""
    if len(pattern) > MAX_CHECKED_PATTERN_CHARS:
        return ""
    options = jsonschema_rs.RegexOptions(size_limit=PATTERN_BYTES)
    try:
        jsonschema_rs.validator_for({"pattern": pattern}, pattern_options=options)
    except jsonschema_rs.ValidationError:
        if any(mark in pattern for mark in ("(?=", "(?!", "(?<=", "(?<!")):
            return "lookaround is not supported"
        return "" if "{" in pattern else "it cannot be parsed"  # repetitions may only have been too large
    return ""
