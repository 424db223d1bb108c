import pytest

from gateway.api.events import reasoning_tokens


@pytest.mark.parametrize(
    ("reasoning", "frames", "count"),
    [
        ([], [(3, 1)], 0),
        ([(0, 6)], [(3, 1), (3, 1), (3, 1)], 2),
        ([(0, 5)], [(3, 1), (3, 2), (3, 4)], 3),  # the second frame has its last two characters and more
        ([(1, 5)], [(1, 1), (3, 2), (0, 4), (3, 8), (0, 16)], 14),  # half a character has no text
        ([(2, 4), (8, 10)], [(1, 1)] * 12, 4),
    ],
)
def test_reasoning_tokens(reasoning: list[tuple[int, int]], frames: list[tuple[int, int]], count: int) -> None:
    assert reasoning_tokens(reasoning, frames) == count
