"""Schemas from pydantic, zod, and OpenAPI: annotations are dropped, and inexact bounds refused by path."""

import json
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer

from gateway.errors import InvalidParameter
from gateway.tokenizing.schema_keywords import ENFORCED_FORMATS, SchemaReader

ANNOTATIONS = (
    "base64url", "binary", "byte", "decimal", "directory-path", "double", "file-path", "float", "idn-email",
    "idn-hostname", "int32", "int64", "ipvanyaddress", "iri", "json-pointer", "password", "path", "regex",
    "uri-reference", "uint64", "x",
)  # fmt: skip
PLACE = "tools.1.function.parameters"
BIG = 2**53 + 1


def compiles(schema: object) -> bool:
    source = LLMatcher.grammar_from_json_schema(json.dumps(schema))
    return not LLMatcher(LLTokenizer("byte"), source, log_level=0).is_error()


@pytest.mark.parametrize("name", ANNOTATIONS)
def test_an_unknown_format_is_an_annotation(name: str) -> None:
    inner = {"type": "string", "format": name}
    schema = {"type": "object", "properties": {"format": inner, "b": {"type": "array", "items": inner}}}
    assert not compiles(schema)
    kept = SchemaReader(PLACE).read(schema)
    assert kept["properties"] == {
        "format": {"type": "string"},
        "b": {"type": "array", "items": {"type": "string"}},
    }
    assert compiles(kept)


@pytest.mark.parametrize("name", sorted(ENFORCED_FORMATS))
def test_a_known_format_is_enforced(name: str) -> None:
    schema = {"type": "string", "format": name}
    assert SchemaReader(PLACE).read(schema) == schema
    assert compiles(schema)


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"const": BIG}, "const"),
    ({"const": {"a": [-BIG]}}, "const"),
    ({"enum": [1, BIG]}, "enum"),
    ({"minimum": -BIG}, "minimum"),
    ({"maximum": 2**63 - 1}, "maximum"),
    ({"exclusiveMinimum": BIG}, "exclusiveMinimum"),
    ({"exclusiveMaximum": 2**64}, "exclusiveMaximum"),
    ({"multipleOf": BIG}, "multipleOf"),
    ({"pattern": "(?=x)"}, "pattern"),
    ({"pattern": "("}, "pattern"),
    ({"type": "strin"}, "type"),
    ({"type": ["string", "none"]}, "type"),
]


@pytest.mark.parametrize(("inner", "word"), REFUSED)
def test_an_error_names_its_path(inner: dict[str, Any], word: str) -> None:
    with pytest.raises(InvalidParameter) as refused:
        SchemaReader(PLACE).read({"type": "object", "properties": {"d": inner}})
    assert refused.value.param == f"{PLACE}.properties.d.{word}"
    assert f"{PLACE}.properties.d.{word}" in str(refused.value)


def test_exact_numbers_and_non_keywords_are_unchanged() -> None:
    schema = {
        "type": "object",
        "properties": {"a": {"enum": [2**53, -(2**53), "(", {"format": "x"}]}, "pattern": {"pattern": "^a{2,3}$"}},
        "default": {"const": BIG},
    }
    assert SchemaReader(PLACE).read(schema) == schema
