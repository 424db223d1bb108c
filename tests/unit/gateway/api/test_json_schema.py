"""Unenforceable schema keywords are refused by name, or omitted with lenient_schemas."""

import json
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer

from gateway.api.events import SchemaCheck
from gateway.api.sampling import enforceable
from gateway.errors import InvalidParameter
from gateway.tokenizing.schema_keywords import UNENFORCEABLE
from protocol.generation import Grammar

VALUES: dict[str, Any] = {
    "uniqueItems": True, "minContains": 1, "maxContains": 2, "dependentRequired": {"a": ["b"]},
    "dependencies": {"a": ["b"]}, "dependentSchemas": {"a": {"type": "object"}}, "unevaluatedProperties": False,
    "unevaluatedItems": False,
}  # fmt: skip


def source_of(schema: object, *, lenient: bool = False) -> Any:
    check = SchemaCheck() if lenient else None
    grammar = enforceable(Grammar("json_schema", json.dumps(schema), "response_format"), check)
    assert grammar is not None
    assert (grammar.kind, grammar.field) == ("json_schema", "response_format")
    return json.loads(grammar.source)


def compiles(schema: object) -> bool:
    source = LLMatcher.grammar_from_json_schema(json.dumps(schema))
    return not LLMatcher(LLTokenizer("byte"), source, log_level=0).is_error()


@pytest.mark.parametrize("word", sorted(UNENFORCEABLE))
def test_unenforceable_keywords(word: str) -> None:
    inner = {"type": "array" if "tems" in word else "object", word: VALUES.get(word, {"type": "object"})}
    schema = {"type": "object", "properties": {"a": {"anyOf": [inner, {"type": "null"}]}}, "required": ["a"]}
    assert not compiles(schema)
    with pytest.raises(InvalidParameter, match=f"'{word}'.*lenient_schemas") as caught:
        source_of(schema)
    assert (caught.value.param, caught.value.code) == ("response_format", "unsupported_schema_keyword")
    kept = source_of(schema, lenient=True)
    del inner[word]
    assert kept == schema
    assert compiles(kept)


def test_names_and_values_are_not_keywords() -> None:
    schema = {
        "type": "object",
        "properties": {
            "not": {"const": {"if": 1}},
            "then": {"enum": ["else", {"not": {}}]},
            "x": {"default": {"not": 1}},
        },
        "$defs": {"contains": {"type": "string"}},
        "required": ["not"],
    }
    assert source_of(schema) == schema


def test_keywords_without_effect_are_dropped() -> None:
    assert source_of({"type": "array", "uniqueItems": False}) == {"type": "array"}


@pytest.mark.parametrize("kind", ["lark", "regex", "json_object"])
def test_other_grammars_are_unchanged(kind: Any) -> None:
    grammar = Grammar(kind, 'start: "not"', "f")
    assert enforceable(grammar, None) is grammar
    assert enforceable(None, None) is None
