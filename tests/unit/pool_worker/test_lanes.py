"""Which lane is served next, and each lane's share in the long run."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pool_worker.consumer import CHECK_S, Lane, LaneShares, expected_tokens
from protocol import job as m

MOST_TOKENS = 500
costs = st.integers(1, MOST_TOKENS)


def next_of(shares: LaneShares, *lanes: Lane) -> Lane:
    (lane,) = shares.divide(1, {lane: lane.waiting for lane in lanes}, {})
    return lane


def backlogged(shares: LaneShares, *names: str) -> list[Lane]:
    lanes = [Lane("m", name) for name in names]
    for lane in lanes:
        shares.learn(lane, 10_000, 0.0)
    return lanes


def job(prompt_tokens: int, max_tokens: int, n: int = 1, resumed: tuple[int, ...] = ()) -> m.Job:
    points = tuple(m.ResumePoint(i, m.pack_token_ids(range(tokens)), 0) for i, tokens in enumerate(resumed))
    sampling = m.Sampling(max_tokens=max_tokens, n=n)
    prompt = m.pack_token_ids(range(prompt_tokens))
    return m.Job(m.PROTOCOL_VERSION, "r", 1, "m", "", sampling, prompt, resume=points)


@given(st.lists(st.tuples(costs, st.sampled_from([0.5, 1.0, 3.0])), min_size=2, max_size=5))
def test_backlogged_lanes_are_served_by_their_weights(kinds) -> None:
    """Between any two lanes the weighted tokens never differ by more than the largest job."""
    shares = LaneShares()
    lanes = backlogged(shares, *(f"h{i}" for i in range(len(kinds))))
    kind = dict(zip(lanes, kinds, strict=True))
    served = dict.fromkeys(lanes, 0.0)
    for _ in range(300):
        lane = next_of(shares, *lanes)
        tokens, weight = kind[lane]
        shares.charge(lane, tokens, weight)
        served[lane] += tokens / weight
    largest = max(tokens / weight for tokens, weight in kinds)
    assert max(served.values()) - min(served.values()) <= largest * (1 + 1e-9)


@given(st.lists(st.tuples(costs, costs), min_size=50, max_size=50))
def test_lanes_are_settled_by_actual_cost(jobs) -> None:
    """One lane asks for far more than it uses; the other for what it uses. After settling, both get the same."""
    shares = LaneShares()
    exact, greedy = backlogged(shares, "h0", "h1")
    served = {exact: 0, greedy: 0}
    for used, unused in jobs * 4:
        lane = next_of(shares, exact, greedy)
        charged = used + (unused if lane is greedy else 0)
        shares.charge(lane, charged, 1.0)
        shares.settle(lane, used - charged, 1.0)
        served[lane] += used
    assert abs(served[exact] - served[greedy]) <= 2 * MOST_TOKENS


@given(st.integers(1, 200), costs)
def test_an_empty_lane_comes_next_but_earns_no_credit(jobs_before, cost) -> None:
    shares = LaneShares()
    busy, quiet = backlogged(shares, "h0", "h1")
    shares.learn(quiet, 0, 0.0)
    for _ in range(jobs_before):
        shares.charge(busy, cost, 1.0)
    shares.learn(quiet, 10_000, 0.0)
    order = []
    for _ in range(20):
        lane = next_of(shares, busy, quiet)
        order.append(lane)
        shares.charge(lane, cost, 1.0)
    assert order[0] is quiet
    # At most two in a row for the first one; then they alternate.
    assert all(a is not b for a, b in pairwise(order[2:]))


def test_a_lane_keeps_its_debt_while_it_is_empty() -> None:
    shares = LaneShares()
    light, heavy = backlogged(shares, "h0", "h1")
    shares.charge(heavy, 1000, 1.0)
    shares.learn(heavy, 0, 0.0)
    shares.learn(heavy, 1, 0.0)
    for _ in range(10):
        assert next_of(shares, heavy, light) is light
        shares.charge(light, 99, 1.0)


def test_the_resume_lane_comes_first_and_batch_last() -> None:
    shares = LaneShares()
    low, high, resume = backlogged(shares, "low", "h3", "resume")
    shares.charge(resume, 10_000, 1.0)
    shares.charge(high, 100, 1.0)
    resume.waiting, high.waiting, low.waiting = 2, 3, 4
    waiting = {lane: lane.waiting for lane in (low, high, resume)}
    assert shares.divide(4, waiting, {}) == {resume: 2, high: 2}
    assert shares.divide(6, waiting, {}) == {resume: 2, high: 3, low: 1}
    assert shares.divide(60, waiting, {}) == waiting


def test_dividing_many_slots_equals_dividing_one_by_one() -> None:
    shares = LaneShares()
    small, large = backlogged(shares, "h0", "h1")
    shares.charge(small, 100, 1.0)
    shares.charge(large, 300, 1.0)
    asked = shares.divide(40, {small: 1000, large: 1000}, {})
    assert asked == {small: 30, large: 10}
    # Jobs asked for but not yet here count as served.
    assert shares.divide(4, {small: 1000, large: 1000}, asked) == {small: 3, large: 1}


def test_the_maximum_cost_of_a_job() -> None:
    assert expected_tokens(job(10, 100)) == 110
    assert expected_tokens(job(10, 100, n=3)) == 310
    assert expected_tokens(job(10, 100, n=2, resumed=(30, 100))) == 10 + 200 - 130
    assert expected_tokens(job(10, 100, resumed=(100,))) == 10


def test_knowledge_of_an_empty_lane_ages() -> None:
    lane = Lane("m", "h0")
    assert lane.is_stale(0.0)
    LaneShares().learn(lane, 0, 5.0)
    assert not lane.is_stale(5.0 + CHECK_S / 2)
    assert lane.is_stale(5.0 + 2 * CHECK_S)
    LaneShares().learn(lane, 1, 5.0)
    assert not lane.is_stale(5.0 + 2 * CHECK_S)


@pytest.mark.parametrize("weight", [0.0, -1.0])
def test_a_zero_weight_counts_as_a_small_one(weight: float) -> None:
    shares = LaneShares()
    (lane,) = backlogged(shares, "h0")
    shares.charge(lane, 100, weight)
    assert 0 < lane.served < float("inf")
