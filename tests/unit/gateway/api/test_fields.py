"""Request bodies: pydantic and all later parsers accept the same JSON."""

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.api.fields import MAX_SEARCHED_VALUES, Body, parse_body
from gateway.errors import BadRequest, InvalidParameter, MalformedJson

NUMBERS = ("NaN", "Infinity", "-Infinity", "1e400", "-1E+999", "1e309", "9" * 400 + ".5")


@pytest.mark.parametrize("number", NUMBERS)
@pytest.mark.parametrize(
    ("body", "param"),
    [
        ('{"junk": %s}', "junk"),
        ('{"a": [1, {"b": [0.5, %s]}], "c": {}}', "a.1.b.1"),
        ('{"metadata": {"x": %s, "y": 1.0}}', "metadata.x"),
    ],
)
def test_an_invalid_number_is_refused_by_field(body: str, param: str, number: str) -> None:
    with pytest.raises(InvalidParameter) as refused:
        parse_body(Body, (body % number).encode())
    assert refused.value.param == param
    assert f"'{param}'" in refused.value.message


@pytest.mark.parametrize(
    "body",
    [
        '{"a": 1e999, "a": 1}',  # pydantic reads the last one
        '{"a": NaN, "b": [%s]}' % ("[]," * MAX_SEARCHED_VALUES + "[]"),
    ],
)
def test_an_invalid_number_without_a_field_is_refused(body: str) -> None:
    with pytest.raises(MalformedJson):
        parse_body(Body, body.encode())


@pytest.mark.parametrize("number", ["1e308", "-1.7976931348623157e308", "1e-400", "0e999", str(10**40), "-0.0"])
def test_valid_numbers_are_accepted(number: str) -> None:
    assert parse_body(Body, f'{{"a": {number}}}'.encode()).model_extra is not None


_MARKS = (
    "{",
    "}",
    "[",
    "]",
    ",",
    ":",
    " ",
    "null",
    "true",
    '"a"',
    '"\\ud800"',
    '"\\u00e4\\n"',
    '"\x01"',
    "\u00ff",
    "\ufeff",
)
_NUMBERS = ("1", "-", "0", ".", "e", "E+", "9" * 30, "NaN", "Infinity", "1e400", "1e-400")
_WORDS = st.sampled_from((*_MARKS, *_NUMBERS))


def _values(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    objects = st.lists(inner, max_size=3).map(
        lambda values: "{{{}}}".format(",".join(f'"k{i % 2}":{v}' for i, v in enumerate(values)))
    )
    return st.lists(inner, max_size=3).map(lambda values: "[{}]".format(",".join(values))) | objects


_VALUES = st.recursive(_WORDS | st.floats().map(repr) | st.integers().map(str), _values, max_leaves=12)


@given(_VALUES | st.lists(_WORDS, max_size=8).map("".join), st.sampled_from(["utf-8", "latin-1"]))
def test_accepted_bodies_can_be_parsed_and_encoded_everywhere(value: str, encoding: str) -> None:
    body = b'{"a": %b}' % value.encode(encoding, "replace")
    try:
        taken: Any = parse_body(Body, body)
    except BadRequest:
        return
    assert isinstance(msgspec.json.decode(body), dict)
    assert isinstance(msgspec.json.decode(msgspec.json.encode(taken.model_extra)), dict)
