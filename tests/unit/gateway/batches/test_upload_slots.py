"""Upload slots, and the minimum speed of uploads."""

from contextlib import ExitStack

import pytest

from gateway.api.errors import form_of
from gateway.batches.files import Pace, UploadSlots
from gateway.errors import BodyTooLarge, Overloaded, RateLimitExceeded, RequestTooSlow


@pytest.mark.parametrize(("max_uploads", "share"), [(1, 1), (2, 1), (3, 1), (4, 2), (16, 8)])
def test_a_tenant_holds_no_more_than_it_leaves_free(max_uploads: int, share: int) -> None:
    slots = UploadSlots(max_uploads)
    with ExitStack() as stack:
        for _ in range(share):
            stack.enter_context(slots.hold("greedy"))
        for _ in range(2):
            with pytest.raises((RateLimitExceeded, Overloaded)), slots.hold("greedy"):
                pass
        for number in range(max_uploads - share):
            if number == 0 or share > 1:
                stack.enter_context(slots.hold(f"other {number}"))
    with slots.hold("greedy"):
        pass


def test_a_full_gateway_and_a_full_share_have_different_errors() -> None:
    slots = UploadSlots(4)
    with slots.hold("a"), slots.hold("a"):
        with pytest.raises(RateLimitExceeded) as refused, slots.hold("a"):
            pass
        form = form_of(refused.value)
        assert (form.status, refused.value.code, form.should_retry) == (429, "too_many_uploads", True)
        with slots.hold("b"), slots.hold("c"), pytest.raises(Overloaded), slots.hold("d"):
            pass


def test_written_bytes_count_for_all_uploads_of_the_tenant() -> None:
    slots = UploadSlots(16)
    with slots.hold("a") as first:
        first.count(60, room_bytes=100)
        with slots.hold("b") as other:
            other.count(60, room_bytes=100)
        with slots.hold("a") as second, pytest.raises(BodyTooLarge):
            second.count(60, room_bytes=100)
        with slots.hold("a") as third:  # ended uploads do not count
            third.count(40, room_bytes=100)


@pytest.mark.parametrize(
    ("came", "is_too_slow"),
    [
        ([(1, 10.0)] * 3, True),  # a byte every ten seconds once held a slot for an hour
        ([(3000, 30.0)], False),
        ([(2999, 30.0)], True),
        ([(2000, 1.0), (0, 28.0), (1000, 1.0)], False),  # a burst, and a pause
        ([(100_000, 1.0), (1, 29.0), (1, 29.9)], False),  # the second window has not ended
        ([(100_000, 1.0), (1, 29.0), (1, 29.9), (1, 0.1)], True),
        ([(1, 0.0)] * 1000, False),  # no time spent waiting for the client
    ],
)
def test_uploads_have_a_minimum_speed(came: list[tuple[int, float]], is_too_slow: bool) -> None:
    pace = Pace(min_bytes_per_s=100, window_s=30.0)
    *before, last = came
    for size, waited_s in before:
        pace.note(size, waited_s)
    if not is_too_slow:
        pace.note(*last)
        return
    with pytest.raises(RequestTooSlow):
        pace.note(*last)
