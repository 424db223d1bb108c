"""Validation of lines: unreadable or deeply nested lines are invalid immediately, instead of failing later."""

import msgspec
import pytest

from gateway.batches.lines import MAX_DEPTH, Wrong, check_line, is_deeper

HEAD = b'{"custom_id":"a","method":"POST","url":"/v1/completions","body":{"model":"m","x":'


def nested(levels: int) -> bytes:
    return HEAD + b"[" * levels + b"]" * levels + b"}}"


@pytest.mark.parametrize(
    ("text", "code"),
    [
        (b"[" * 1_500, "invalid_json_line"),
        (b'{"a":' * 1_500, "invalid_json_line"),
        (nested(1_500), "invalid_json_line"),
        (nested(MAX_DEPTH + 1), "invalid_json_line"),
        (HEAD + b'"\xff"}}', "invalid_json_line"),
        (HEAD + b"NaN}}", "invalid_json_line"),
        (HEAD + b"1e400}}", "invalid_json_line"),
        (b"[1]", "invalid_json_line"),
        (HEAD + b"[" + b"[]," * 70_000 + b"[]]}}", "too_many_values"),
    ],
    ids=["open-lists", "open-objects", "nested", "too-deep", "not-utf-8", "nan", "infinite", "no-object", "many"],
)
def test_a_poisonous_line_is_invalid(text: bytes, code: str) -> None:
    with pytest.raises(Wrong) as caught:
        check_line(text, "/v1/completions", {"m": "m"})
    assert caught.value.code == code


LINE = '{"custom_id":"ä","body":'


@pytest.mark.parametrize(
    ("rest", "column", "reason"),
    [
        (b"NaN}", 25, "NaN is not a JSON number"),
        (b"Infinity}", 25, "Infinity is not a JSON number"),
        (b"-Infinity}", 25, "-Infinity is not a JSON number"),
        (b'"a\\ud800"}', 27, "an unpaired surrogate"),
        (b'"a\\udc00 b"}', 27, "an unpaired surrogate"),
        (b'"\\ud800\\u0041"}', 26, "an unpaired surrogate"),
        (b'"\\\\ud83d\\ude00\\ud83d\\ude00"}', 33, "an unpaired surrogate"),
        (b'"a\xed\xa0\x80"}', 27, "an unpaired surrogate"),
        (b'"a\xff"}', 27, "byte 0xff is not UTF-8"),
        (b'"a', 27, "the line ends too early"),
        (b"1,}", 27, "trailing comma in object"),
        (b"1} x", 28, "trailing characters"),
        (b"{'a': 1}}", 26, "object keys must be strings"),
    ],
)
def test_a_json_error_has_position_and_reason(rest: bytes, column: int, reason: str) -> None:
    with pytest.raises(Wrong, match=f"This line is not valid JSON: column {column}: {reason}") as caught:
        check_line(LINE.encode() + rest, "/v1/completions", {"m": "m"})
    assert caught.value.code == "invalid_json_line"


def test_an_unknown_position_is_omitted() -> None:
    with pytest.raises(Wrong, match="This line is not valid JSON: Number out of range"):
        check_line(LINE.encode() + b"1e999}", "/v1/completions", {"m": "m"})


def test_a_line_can_be_as_deep_as_a_request() -> None:
    assert check_line(nested(MAX_DEPTH), "/v1/completions", {"m": "m"}).model == "m"


@pytest.mark.parametrize(
    ("value", "levels"),
    [(1, 0), ([], 0), ({}, 0), ([1], 1), ([1, [2]], 2), ([[], [[]]], 2), ({"a": [{"b": 1}], "c": []}, 3)],
)
def test_depth(value: object, levels: int) -> None:
    text = msgspec.json.encode(value)
    assert is_deeper(text, value, levels) is False
    assert levels == 0 or is_deeper(text, value, levels - 1)
