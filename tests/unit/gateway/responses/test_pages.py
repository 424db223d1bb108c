"""Pages of a stored response's input items."""

import json
from typing import Literal

import pytest

from gateway.responses.store import Kept

ITEMS = b'[{"id": "a"}, {"id": "b"}, {"id": "c"}]'


@pytest.mark.parametrize(
    ("after", "order", "ids", "has_more"),
    [
        (None, "asc", ["a", "b"], True),
        ("a", "asc", ["b", "c"], False),
        ("c", "desc", ["b", "a"], False),
        ("c", "asc", [], False),
    ],
)
def test_a_page_starts_after_the_given_item(
    after: str | None, order: Literal["asc", "desc"], ids: list[str], *, has_more: bool
) -> None:
    page = json.loads(Kept(b"{}", ITEMS).page(after, 2, order))
    assert ([item["id"] for item in page["data"]], page["has_more"]) == (ids, has_more)
