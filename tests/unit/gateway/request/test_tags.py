"""Tags of requests: the header, the body, and the record."""

from typing import Any

import pytest

from gateway.errors import InvalidParameter
from gateway.request.tags import TAGS_HEADER, header_tags, request_tags
from protocol.usage import tags_text


@pytest.mark.parametrize(
    ("text", "tags"),
    [
        (None, None),
        ("", None),
        ("team=search", {"team": "search"}),
        (" team = search , feature=auto=complete,empty=", {"team": "search", "feature": "auto=complete", "empty": ""}),
        (",".join(f"n{number}=v" for number in range(16)), {f"n{number}": "v" for number in range(16)}),
    ],
)
def test_the_header_names_tags(text: str | None, tags: dict[str, str] | None) -> None:
    assert header_tags(text) == tags


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("team", "name=value"),
        ("a=b,,c=d", "name=value"),
        ("=b", "names must have 1 to 64"),
        ("n" * 65 + "=b", "names must have 1 to 64"),
        ("a=" + "v" * 513, "values at most 512"),
        (",".join(f"n{number}=v" for number in range(17)), "at most 16"),
        ("team=süd", "must be ASCII"),
    ],
)
def test_a_header_beyond_the_bounds_is_refused_by_name(text: str, said: str) -> None:
    with pytest.raises(InvalidParameter, match=said) as refused:
        header_tags(text)
    assert refused.value.param == TAGS_HEADER


def test_the_body_overrides_the_header_and_both_together_are_bounded() -> None:
    assert request_tags(None, None) is None
    assert request_tags({"a": "1"}, None) == {"a": "1"}
    assert request_tags({"a": "1", "b": "2"}, {"b": "3"}) == {"a": "1", "b": "3"}
    with pytest.raises(InvalidParameter, match="16 tags together, not 17"):
        request_tags({f"n{number}": "" for number in range(16)}, {"other": ""})


@pytest.mark.parametrize("metadata", [{"": "x"}, {"n" * 65: "x"}, {"a": "\0"}, {"a\0": "x"}])
def test_metadata_beyond_the_bounds_is_refused_by_name(metadata: dict[str, Any]) -> None:
    with pytest.raises(InvalidParameter) as refused:
        request_tags(None, metadata)
    assert refused.value.param == "metadata"


def test_the_same_tags_are_kept_as_the_same_text() -> None:
    assert tags_text({"b": "2", "a": "ü"}) == tags_text({"a": "ü", "b": "2"}) == '{"a":"ü","b":"2"}'
    assert tags_text({}) is None
    assert tags_text(None) is None
