"""Unenforceable keywords are validated after generation, at a bounded cost, and reported per choice."""

import json
from typing import Any

import pytest

from gateway.api.events import (
    MAX_ERROR_CHARS,
    MAX_ERRORS,
    MAX_SCHEMA_CHARS,
    MAX_WORK,
    ChatChunks,
    CheckedChunks,
    CompletionChunks,
    SchemaCheck,
)
from protocol.job import Tokens

UNIQUE: dict[str, Any] = {"type": "object", "properties": {"items": {"type": "array", "uniqueItems": True}}}


def check_of(schema: object, tool: str | None = None) -> SchemaCheck:
    check = SchemaCheck()
    check.add(schema, tool)
    return check


def errors_of(schema: object, text: str, finish_reason: str = "stop") -> Any:
    return check_of(schema).fields(text, [], finish_reason).get("schema_errors", "absent")


def test_valid_and_invalid_answers() -> None:
    assert errors_of(UNIQUE, '{"items": [1, 2]}') == []
    [error] = errors_of(UNIQUE, '{"items": [1, 1]}')
    assert error.startswith("$.items: [1,1]")
    [inner] = errors_of({"properties": {"a": {"items": {"not": {"const": 1}}}}}, '{"a": [0, 1]}')
    assert inner.startswith("$.a[1]: ")
    assert errors_of(UNIQUE, "so") == ["$: not JSON"]
    assert errors_of(UNIQUE, "[" * 50_000) == ["$: not JSON"]
    assert errors_of(UNIQUE, '{"items": [1', "length") == "absent"


def test_errors_are_bounded() -> None:
    schema = {"type": "array", "items": {"not": {"type": "string"}}}
    errors = errors_of(schema, json.dumps(["x" * 1000] * 50))
    assert len(errors) == MAX_ERRORS
    assert max(map(len, errors)) == MAX_ERROR_CHARS


@pytest.mark.parametrize(
    "schema",
    [
        {"not": {"$ref": "http://127.0.0.1:1/schema"}},
        {"not": {"$ref": "#"}},
        {"allOf": [{"unevaluatedProperties": False}]},
        {"not": {"pattern": "(?=a)b"}},
        {"not": {"pattern": "((a{1,1000}){1,1000}){1,1000}"}},
        {"not": {"type": "nothing"}},
        {"not": {}, "description": "x" * MAX_SCHEMA_CHARS},
    ],
    ids=["remote", "recursive", "unevaluated", "look-around", "large-pattern", "invalid", "large"],
)
def test_schemas_that_cannot_be_checked(schema: object) -> None:
    assert errors_of(schema, "{}") is None


def test_schema_and_answer_are_bounded_together() -> None:
    schema = {"not": {"const": 1}, "description": "x" * 10_000}
    fits = MAX_WORK // len(json.dumps(schema)) - 2
    assert errors_of(schema, json.dumps("a" * fits)) == []
    assert errors_of(schema, json.dumps("a" * (fits + 1))) is None


def test_calls_are_checked_by_their_tools() -> None:
    check = check_of({"not": {"required": ["a"]}}, "f")
    check.add(UNIQUE, None)
    told = check.fields("so", [{"name": "f", "arguments": '{"a": 1}'}, {"name": "g", "arguments": "?"}], "tool_calls")
    assert len(told["schema_errors"]) == 1
    assert check.fields(None, [{"name": "f", "arguments": "{}"}], "tool_calls") == {"schema_errors": []}


def finished(events: bytes) -> list[Any]:
    rows = [json.loads(event.removeprefix("data: "))["choices"][0] for event in events.decode().split("\n\n")[:-1]]
    return [row.get("schema_errors", "absent") for row in rows]


def frame(text: str, finish_reason: str | None = None) -> Tokens:
    return Tokens("r", 1, 1, 0, (1,), text, finish_reason)


def test_the_last_event_has_schema_errors() -> None:
    chunks = CheckedChunks(ChatChunks("x", 0, "m", choices=1, with_usage=False), check_of(UNIQUE), choices=1)
    assert set(finished(chunks.of(frame('{"items": [1,')))) == {"absent"}
    *before, end = finished(chunks.of(frame(" 1]}", "stop")))
    assert set(before) == {"absent"}
    assert len(end) == 1


def test_an_echoed_prompt_is_not_checked() -> None:
    from gateway.api.logprobs import AnswerOptions

    inner = CompletionChunks("x", 0, "m", choices=1, with_usage=False, options=AnswerOptions(echo="Say: "))
    chunks = CheckedChunks(inner, check_of(UNIQUE), choices=1, echo_chars=5)
    assert finished(chunks.of(frame('{"items": []}', "stop"))) == [[]]
