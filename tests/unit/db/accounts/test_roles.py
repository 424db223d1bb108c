from dataclasses import asdict
from typing import Any

import pytest

from db.accounts.errors import InvalidField, NotAllowed
from db.accounts.principal import ADMIN, INFERENCE, METRICS, NO_POLICY, Policy
from db.accounts.roles import (
    ACTIONS,
    ROLES,
    Action,
    Person,
    Reach,
    Role,
    check_member_key,
    check_team_key,
    check_team_scopes,
    reach_of,
)

MINE, OTHER = "team_mine", "team_other"


def person(role: Role) -> Person:
    return Person("user:me", role, {MINE: role} if role in {"manager", "member"} else {})


# What each reach allows: an object of one's own, one of the team, one of another team.
ALLOWS: dict[Reach, tuple[bool, bool, bool]] = {
    "all": (True, True, True),
    "team": (True, True, False),
    "own": (True, False, False),
    "none": (False, False, False),
}


@pytest.mark.parametrize("action", ACTIONS)
@pytest.mark.parametrize("role", ROLES)
def test_a_role_reaches_as_far_as_its_cell_says(role: Role, action: Action) -> None:
    who, reach = person(role), reach_of(role, action)
    if who.team_ids is None and reach == "own":  # of sessions, which belong to no team
        assert who.may(action)
        return
    own = who.may(action, MINE, "user:me")
    team = who.may(action, MINE, "user:else")
    other = who.may(action, OTHER, "user:me")
    expected = ALLOWS["team" if who.team_ids is not None and reach == "all" else reach]
    assert (own, team, other) == expected
    assert who.may(action) == (reach != "none")


def test_each_team_has_its_own_role() -> None:
    who = Person("user:me", "manager", {MINE: "manager", OTHER: "member"})
    assert who.may("change_keys", MINE, "user:else")
    assert not who.may("change_keys", OTHER, "user:else")
    assert who.may("change_keys", OTHER, "user:me")
    assert who.teams_for("manage_webhooks") == (MINE,)
    assert who.team_ids == (MINE, OTHER)
    with pytest.raises(
        NotAllowed, match=r"Your role \(member\) does not allow you to change, rotate or revoke this key"
    ):
        who.require("change_keys", OTHER, "user:else")


def test_a_person_of_no_team_sees_no_team() -> None:
    lost = Person("user:me", "member")
    assert lost.team_ids == ("team_none",)  # an empty filter would match everything
    assert not lost.sees_team(MINE)


def test_a_team_gives_its_keys_limits_below_its_own_and_nothing_that_overrides_it() -> None:
    team = Policy(requests_per_minute=60, budget_nano_usd=10, budget_period="day", weight=1.0, log_payload=True)
    check_team_key(NO_POLICY, Policy(requests_per_minute=60, budget_nano_usd=10, budget_period="day"), team)
    check_team_key(NO_POLICY, Policy(tokens_per_minute=10**9), team)  # the team has no such limit
    check_team_key(NO_POLICY, Policy(budget_nano_usd=99, budget_period="month"), team)  # of another period
    set_by_admin = Policy(requests_per_minute=99, weight=5.0)
    check_team_key(set_by_admin, set_by_admin, team)  # unchanged
    for before, after, field in (
        (NO_POLICY, Policy(requests_per_minute=61), "requests_per_minute"),
        (NO_POLICY, Policy(budget_nano_usd=11, budget_period="day"), "budget_usd"),
        (NO_POLICY, Policy(weight=2.0), "weight"),
        (NO_POLICY, Policy(log_payload=False), "log_payload"),
        (NO_POLICY, Policy(allow_hosted=("*",)), "allow_hosted"),
        (set_by_admin, Policy(requests_per_minute=99), "weight"),
    ):
        with pytest.raises(InvalidField) as refused:
            check_team_key(before, after, team)
        assert refused.value.field == field


UNLIMITED: dict[str, Any] = {**asdict(NO_POLICY), "expires_unix_ms": None, "models": None}


@pytest.mark.parametrize(
    ("field", "most", "lower", "higher"),
    [
        ("requests_per_minute", 60, 59, 61),
        ("tokens_per_minute", 60, 1, 10**9),
        ("max_concurrent", 2, 1, 3),
        ("budget_nano_usd", 10, 9, 11),
        ("expires_unix_ms", 1000, 999, 1001),
        ("models", ["a", "b"], ("a",), ("a", "c")),
    ],
)
def test_a_member_lowers_what_an_admin_has_set_and_raises_it_no_further(
    field: str, most: Any, lower: Any, higher: Any
) -> None:
    set_by_admin, lowered = {**UNLIMITED, field: most}, {**UNLIMITED, field: lower}
    check_member_key(set_by_admin, lowered, {field: most})
    check_member_key(lowered, set_by_admin, {field: most})
    for wanted in (higher, None):
        for before in (set_by_admin, lowered):
            with pytest.raises(InvalidField, match="only lower it") as refused:
                check_member_key(before, {**UNLIMITED, field: wanted}, {field: most})
            assert refused.value.field in {field, "budget_usd"}
        check_member_key(set_by_admin, {**UNLIMITED, field: wanted}, {})  # the member's own limit
        check_member_key(set_by_admin, {**UNLIMITED, field: wanted}, {field: None})  # the admin has removed it


def test_a_member_does_not_change_the_period_of_a_budget_that_an_admin_has_set() -> None:
    monthly, daily = [{**UNLIMITED, "budget_nano_usd": 50, "budget_period": period} for period in ("month", "day")]
    check_member_key(monthly, daily, {"budget_period": "month"})
    with pytest.raises(InvalidField) as refused:
        check_member_key(monthly, daily, {"budget_nano_usd": 50, "budget_period": "month"})
    assert refused.value.field == "budget_period"


@pytest.mark.parametrize("scope", [ADMIN, METRICS])
def test_a_scope_that_reaches_beyond_a_team_is_for_admins(scope: str) -> None:
    check_team_scopes([INFERENCE])
    with pytest.raises(InvalidField, match="only an admin"):
        check_team_scopes([INFERENCE, scope])
