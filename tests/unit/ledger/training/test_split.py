"""A conversation's part depends only on its beginning and on the seed."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ledger.payloads.errors import ExportError
from ledger.training.conversation import Conversation, Message, root
from ledger.training.split import NAMES, Split

TEXTS = st.text(max_size=5)
MESSAGES = st.builds(
    lambda role, content: {"role": role, "content": content}, st.sampled_from(["user", "assistant"]), TEXTS
)


def conversation(messages: list[Message]) -> Conversation:
    return Conversation(messages, [], None, [])


@given(TEXTS, TEXTS, st.lists(MESSAGES, min_size=1), st.lists(MESSAGES, min_size=1), st.integers(0, 3))
def test_all_that_begin_alike_go_the_same_way(
    system: str, first: str, rest: list[Message], other: list[Message], seed: int
) -> None:
    begin: list[Message] = [{"role": "system", "content": system}, {"role": "user", "content": first}]
    again: list[Message] = [{**begin[0], "content": f" {system}\n"}, {**begin[1], "content": first}]
    split = Split((0.4, 0.3, 0.3), seed)
    parts = {split.part_of(root(conversation([*begin, *rest]))), split.part_of(root(conversation([*again, *other])))}
    assert len(parts) == 1


@given(st.lists(st.binary(min_size=16, max_size=16), unique=True), st.floats(0, 1), st.floats(0, 1))
def test_a_larger_share_takes_nothing_away_from_training(roots: list[bytes], one: float, two: float) -> None:
    small, large = sorted([one, two])
    before, after = Split((small, 1 - small), 7), Split((large, 1 - large), 7)
    for place in roots:
        if small and before.part_of(place) == "train":
            assert after.part_of(place) == "train"


def test_the_shares_are_kept_and_never_change() -> None:
    split = Split((0.8, 0.15, 0.05), 0)
    counts = Counter(split.part_of(number.to_bytes(16, "big")) for number in range(4000))
    assert counts == {"train": 3156, "validation": 628, "test": 216}  # as it was when this was written
    assert set(counts) == set(NAMES)
    only = Split((0.0, 1.0), 0)
    assert only.parts == ["validation"]
    assert only.part_of(b"x") == "validation"


@pytest.mark.parametrize("shares", [(), (0.5,), (0.5, 0.6), (1.5, -0.5), (0.25,) * 4])
def test_shares_must_be_shares(shares: tuple[float, ...]) -> None:
    with pytest.raises(ExportError):
        Split(shares, 0)
