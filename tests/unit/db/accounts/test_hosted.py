"""Permissions for hosted APIs: none by default, and a key can only narrow its team's."""

from typing import Any

import pytest

from db.accounts.principal import DEFAULT_TEAM_ID, Leaves, Policy, Principal, allowed_providers, why_no_leave

PROVIDERS = ("openai", "anthropic", "azure")


def allowed(
    team: Leaves | None, key: Leaves | None, *, configured: Leaves | None = None, team_id: str = "team_a"
) -> tuple[str, ...]:
    principal = Principal(
        "key_a",
        "a",
        team_id,
        "A",
        "org_default",
        key_policy=Policy(allow_hosted=key),
        team_policy=Policy(allow_hosted=team),
    )
    return allowed_providers(principal, configured, PROVIDERS, "gpt-4o")


@pytest.mark.parametrize(
    ("team", "key", "providers"),
    [
        (None, None, ()),
        (None, ("*",), ()),  # its team has said nothing: the key cannot
        ((), ("*",), ()),
        (("openai",), None, ("openai",)),
        (("openai",), (), ()),
        (("openai",), ("anthropic",), ()),
        (("openai", "anthropic"), ("anthropic", "azure"), ("anthropic",)),
        (("*",), None, PROVIDERS),
        (("a*",), None, ("anthropic", "azure")),
        (("openai/gpt-*",), None, ("openai",)),
        (("openai/gpt-3*",), None, ()),
        (("openai/gpt-*",), ("openai/gpt-4",), ()),  # each must allow this very model
        (("*/gpt-4o",), ("openai",), ("openai",)),
    ],
)
def test_a_key_narrows_its_team(team: Leaves | None, key: Leaves | None, providers: tuple[str, ...]) -> None:
    assert allowed(team, key) == providers


def test_a_key_without_a_team_of_its_own_speaks_for_itself() -> None:
    assert allowed(None, ("openai",), team_id=DEFAULT_TEAM_ID) == ("openai",)
    assert allowed(None, None, team_id=DEFAULT_TEAM_ID) == ()
    assert allowed((), ("openai",), team_id=DEFAULT_TEAM_ID) == ()
    assert allowed(("azure",), ("openai",), team_id=DEFAULT_TEAM_ID) == ()


@pytest.mark.parametrize(("team", "key"), [(True, None), (None, True), (True, False), (False, True)])
def test_whoever_demands_trusted_pools_goes_to_no_hosted_api(team: bool | None, key: bool | None) -> None:
    policies: dict[str, Any] = {
        "team_policy": Policy(allow_hosted=("*",), trusted_only=team),
        "key_policy": Policy(allow_hosted=("*",), trusted_only=key),
    }
    principal = Principal("key_a", "a", "team_a", "A", "org_default", **policies)
    assert principal.trusted_only
    assert allowed_providers(principal, ("*",), PROVIDERS, "gpt-4o") == ()


def test_the_configuration_stands_for_a_team_that_says_nothing() -> None:
    assert allowed(None, None, configured=("openai",)) == ("openai",)
    assert allowed(None, ("azure",), configured=("openai",)) == ()
    assert allowed((), None, configured=("openai",)) == ()
    assert allowed(None, ("azure",), configured=("openai",), team_id=DEFAULT_TEAM_ID) == ()


@pytest.mark.parametrize("text", ["", "/", "openai/", "/gpt", "open ai", "openai\n", "x" * 201])
def test_what_is_no_leave(text: str) -> None:
    assert why_no_leave(text) is not None


@pytest.mark.parametrize("text", ["openai", "*", "openai/gpt-*", "bedrock/org/model"])
def test_what_is_a_leave(text: str) -> None:
    assert why_no_leave(text) is None
