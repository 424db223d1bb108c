from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from gateway.admission.lanes import candidate_lanes, choose_lane
from protocol import subjects
from tests.unit.gateway.admission.controls import admission, control

TENANTS = [f"key_{number}" for number in range(4000)]


def test_each_tenant_has_the_same_two_candidates_at_all_gateways() -> None:
    """Gateways must agree, so the expected values are constants."""
    assert candidate_lanes("key_1") == ("h5", "h7")
    assert all(len(set(candidate_lanes(tenant))) == 2 for tenant in TENANTS)
    assert all(set(candidate_lanes(tenant)) <= set(subjects.HIGH_LANES) for tenant in TENANTS)


def test_tenants_are_spread_evenly() -> None:
    first = Counter(candidate_lanes(tenant)[0] for tenant in TENANTS)
    pairs = Counter(frozenset(candidate_lanes(tenant)) for tenant in TENANTS)
    assert set(first) == set(subjects.HIGH_LANES)
    assert max(first.values()) < 1.2 * len(TENANTS) / 8
    assert len(pairs) == 28  # all pairs of lanes
    assert max(pairs.values()) < 1.5 * len(TENANTS) / 28


def test_the_emptier_candidate_is_chosen() -> None:
    lanes = ("h1", "h2")
    assert choose_lane(lanes, (0, 0), None) == "h1"
    assert choose_lane(lanes, (5, 5), None) == "h1"
    assert choose_lane(lanes, (5, 4), None) == "h2"
    assert choose_lane(lanes, (0, 9), "h2") == "h2"  # its jobs wait there


@given(st.text(min_size=1), st.text(min_size=1))
def test_two_tenants_never_share_a_lane_while_the_other_candidate_is_empty(one: str, other: str) -> None:
    if one == other:
        return
    gate = control()
    theirs = {gate.enter(admission(f"a{n}", tenant=one)).lane for n in range(3)}
    ours = {gate.enter(admission(f"b{n}", tenant=other)).lane for n in range(3)}
    assert (len(theirs), len(ours)) == (1, 1)
    assert theirs != ours
