"""Changing organisations, teams and keys: what is refused, and what the audit log says."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest
from pydantic import SecretStr
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncEngine

from db.accounts.audit import AuditEntry, AuditFilter, list_changes
from db.accounts.checks import checked_grant
from db.accounts.errors import InvalidField, NameTaken, UnknownKey, UnknownOrganisation, UnknownTeam
from db.accounts.keys import Grant, create_key, find_key, list_keys, load_principals, revoke_key, rotate_key, update_key
from db.accounts.principal import ADMIN, INFERENCE, NO_POLICY, Policy
from db.accounts.teams import (
    create_organisation,
    create_team,
    list_organisations,
    list_teams,
    rename_organisation,
    update_team,
)
from db.accounts.token import hash_token
from db.engine import create_engine
from tests.waiting import HANGS_S

PEPPER = SecretStr("p" * 64)
ME = "user:me"
BUDGET = Policy(budget_nano_usd=50 * 10**9, budget_period="month")


@pytest.fixture
async def engine(database_url: str) -> AsyncIterator[AsyncEngine]:
    engine = create_engine(database_url, lock_limit_s=HANGS_S)  # changes at once wait for each other
    yield engine
    await engine.dispose()


async def changes_of(engine: AsyncEngine, subject_id: str) -> list[tuple[str, Any, Any]]:
    """Oldest first: action, before, after."""
    found = await list_changes(engine, AuditFilter(subject_id=subject_id), 100)
    assert {entry.actor for entry in found} == {ME}
    return [(entry.action, entry.before, entry.after) for entry in reversed(found)]


async def test_organisations_are_made_and_renamed(engine: AsyncEngine) -> None:
    made = await create_organisation(engine, "Acme", ME)
    renamed = await rename_organisation(engine, "Acme", "Acme Inc.", ME)
    assert renamed == replace(made, name="Acme Inc.")
    assert await rename_organisation(engine, made.organisation_id, "Acme Inc.", ME) == renamed
    assert [found.name for found in await list_organisations(engine)] == ["default", "Acme Inc."]
    for wrong in (create_organisation(engine, "default", ME), rename_organisation(engine, "Acme Inc.", "default", ME)):
        with pytest.raises(NameTaken, match="'default'"):
            await wrong
    with pytest.raises(UnknownOrganisation, match="'nobody'"):
        await rename_organisation(engine, "nobody", "x", ME)
    # A change that changes nothing is none, and one that is refused leaves nothing behind.
    assert await changes_of(engine, made.organisation_id) == [
        ("organisation.create", None, {"name": "Acme"}),
        ("organisation.update", {"name": "Acme"}, {"name": "Acme Inc."}),
    ]


async def test_teams_are_made_and_changed(engine: AsyncEngine) -> None:
    acme = await create_organisation(engine, "Acme", ME)
    made = await create_team(engine, "search", ME, "Acme", BUDGET)
    assert (made.organisation_id, made.organisation_name) == (acme.organisation_id, "Acme")
    changes = {"name": "find", "organisation": "default", "budget_nano_usd": None, "budget_period": None, "weight": 2.0}
    changed = await update_team(engine, "search", changes, ME)
    assert changed.policy == Policy(weight=2.0)
    assert changed == (await list_teams(engine))[1]
    assert await update_team(engine, made.team_id, {"weight": 2.0}, ME) == changed
    assert await changes_of(engine, made.team_id) == [
        (
            "team.create",
            None,
            {
                "name": "search",
                "organisation_id": acme.organisation_id,
                "budget_nano_usd": 50 * 10**9,
                "budget_period": "month",
            },
        ),
        (
            "team.update",
            {
                "name": "search",
                "organisation_id": acme.organisation_id,
                "budget_nano_usd": 50 * 10**9,
                "budget_period": "month",
                "weight": None,
            },
            {
                "name": "find",
                "organisation_id": "org_default",
                "budget_nano_usd": None,
                "budget_period": None,
                "weight": 2.0,
            },
        ),
    ]
    with pytest.raises(NameTaken):
        await create_team(engine, "find", ME)
    with pytest.raises(UnknownTeam):
        await update_team(engine, "search", {}, ME)
    with pytest.raises(InvalidField, match="organisation: no organization has the id or name 'x'"):
        await update_team(engine, "find", {"organisation": "x"}, ME)


async def test_a_key_is_changed_by_its_fields(engine: AsyncEngine) -> None:
    team = await create_team(engine, "search", ME)
    made, token = await create_key(engine, "a", PEPPER, Grant(models=("small",)), ME)
    changes = {"team": "search", "scopes": (ADMIN, INFERENCE), "models": None, "expires_unix_ms": 2 * 10**12}
    changed = await update_key(engine, "a", {**changes, "requests_per_minute": 60}, ME)
    assert (changed.team_id, changed.scopes, changed.models) == (team.team_id, (INFERENCE, ADMIN), None)
    assert changed.policy == Policy(requests_per_minute=60)
    assert changed == await find_key(engine, made.key_id)
    async with engine.connect() as connection:
        principal = (await load_principals(connection))[hash_token(token, PEPPER)]
    assert (principal.team_name, principal.scopes) == ("search", frozenset({INFERENCE, ADMIN}))
    [created, updated] = await changes_of(engine, made.key_id)
    told = {"name": "a", "team_id": "team_default", "scopes": ["inference"], "models": ["small"]}
    assert created == ("key.create", None, told)
    assert updated == (
        "key.update",
        {
            "team_id": "team_default",
            "scopes": ["inference"],
            "models": ["small"],
            "expires_unix_ms": None,
            "requests_per_minute": None,
        },
        {
            "team_id": team.team_id,
            "scopes": ["inference", "admin"],
            "models": None,
            "expires_unix_ms": 2 * 10**12,
            "requests_per_minute": 60,
        },
    )
    await create_key(engine, "b", PEPPER, actor=ME)
    with pytest.raises(NameTaken, match="'b'"):
        await update_key(engine, "a", {"name": "b"}, ME)
    await revoke_key(engine, "a", ME)
    with pytest.raises(UnknownKey):
        await update_key(engine, made.key_id, {"name": "c"}, ME)
    assert (await find_key(engine, made.key_id)).revoked_unix_ms is not None


async def test_after_a_rotation_both_tokens_are_good_until_the_next(engine: AsyncEngine) -> None:
    made, first = await create_key(engine, "a", PEPPER, actor=ME)
    rotated, second = await rotate_key(engine, "a", PEPPER, ME)
    assert (
        rotated
        == replace(made, last_four=second[-4:], previous_until_unix_ms=rotated.previous_until_unix_ms)
        == await find_key(engine, "a")
    )

    async def accepted() -> set[str]:
        async with engine.connect() as connection:
            hashes = await load_principals(connection)
        return {token for token in (first, second, third) if hash_token(token, PEPPER) in hashes}

    third = ""
    assert await accepted() == {first, second}
    _, third = await rotate_key(engine, "a", PEPPER, ME)
    assert await accepted() == {second, third}
    now, fourth = await rotate_key(engine, "a", PEPPER, ME, 0)
    assert now.previous_until_unix_ms is None
    assert await accepted() == set()
    first = fourth
    assert await accepted() == {fourth}
    for grace_s in (-1, 31 * 86_400):
        with pytest.raises(InvalidField, match="grace_s"):
            await rotate_key(engine, "a", PEPPER, ME, grace_s)
    _, rotation, *_ = await changes_of(engine, made.key_id)
    assert rotation == ("key.rotate", {"last_four": made.last_four}, {"last_four": second[-4:], "grace_s": 86_400})


async def test_changes_at_once_come_one_after_another(engine: AsyncEngine) -> None:
    made, _ = await create_key(engine, "a", PEPPER, actor=ME)
    await asyncio.gather(*(update_key(engine, "a", {"requests_per_minute": n}, ME) for n in range(1, 6)))
    _, *changes = await changes_of(engine, made.key_id)
    next_of = {before["requests_per_minute"]: after["requests_per_minute"] for _, before, after in changes}
    told, seen = next_of.get(None), []
    while told is not None:
        seen.append(told)
        told = next_of.get(told)
    assert sorted(seen) == [1, 2, 3, 4, 5]
    assert (await find_key(engine, "a")).policy.requests_per_minute == seen[-1]


async def test_no_secret_is_in_the_audit_log(engine: AsyncEngine) -> None:
    _, first = await create_key(engine, "a", PEPPER, actor=ME)
    _, second = await rotate_key(engine, "a", PEPPER, ME)
    async with engine.connect() as connection:
        rows = str((await connection.execute(text("SELECT * FROM audit_log"))).all())
    for token in (first, second):
        assert token not in rows
        assert hash_token(token, PEPPER) not in rows


async def test_the_audit_log_is_filtered_and_paged(engine: AsyncEngine) -> None:
    for number in range(5):
        await create_key(engine, f"key {number}", PEPPER, actor=ME if number % 2 else "key:other")
    everything = await list_changes(engine, AuditFilter(), 100)
    assert {entry.after["name"] for entry in everything if entry.after} == {f"key {number}" for number in range(5)}
    assert [entry.at_unix_ms for entry in everything] == sorted((e.at_unix_ms for e in everything), reverse=True)
    pages: list[AuditEntry] = []
    last = None
    while page := await list_changes(engine, AuditFilter(after_id=last), 2):
        pages.extend(page)
        last = page[-1].id
    assert pages == everything
    assert {entry.actor for entry in await list_changes(engine, AuditFilter(actor=ME), 100)} == {ME}
    newest_unix_ms = everything[0].at_unix_ms
    since = AuditFilter(since_unix_ms=newest_unix_ms, until_unix_ms=newest_unix_ms + 1)
    assert {entry.at_unix_ms for entry in await list_changes(engine, since, 100)} == {newest_unix_ms}
    assert await list_changes(engine, AuditFilter(until_unix_ms=everything[-1].at_unix_ms), 100) == []


@pytest.mark.parametrize(
    ("policy", "field"),
    [
        (Policy(requests_per_minute=0), "requests_per_minute"),
        (Policy(tokens_per_minute=-1), "tokens_per_minute"),
        (Policy(max_concurrent=2**63), "max_concurrent"),
        (Policy(retention_days=0), "retention_days"),
        (Policy(retention_days=36_501), "retention_days"),
        (replace(BUDGET, budget_nano_usd=-5), "budget_usd"),
        (replace(BUDGET, budget_period=None), "budget_period"),
        (replace(BUDGET, budget_nano_usd=None), "budget_usd"),
        (replace(BUDGET, budget_period="year"), "budget_period"),  # type: ignore[arg-type]
        (Policy(weight=0.0), "weight"),
        (Policy(weight=1001.0), "weight"),
        (Policy(weight=float("nan")), "weight"),
        (Policy(priority="high"), "priority"),
        (Policy(train_ok=True, log_payload=False), "train_ok"),
        (Policy(allow_hosted=("/gpt-4o",)), "allow_hosted"),
        (Policy(allow_hosted=("openai/",)), "allow_hosted"),
        (Policy(allow_hosted=("openai gpt-4o",)), "allow_hosted"),
        (Policy(allow_hosted=("openai",) * 65), "allow_hosted"),
    ],
)
async def test_a_bad_policy_is_refused_by_its_field(sqlite_url: str, policy: Policy, field: str) -> None:
    engine = create_engine(sqlite_url)
    for wrong in (create_team(engine, "a", ME, policy=policy), create_key(engine, "a", PEPPER, Grant(policy=policy))):
        with pytest.raises(InvalidField) as refused:
            await wrong
        assert refused.value.field == field
        assert str(refused.value).startswith(f"{field}: ")
    assert await list_keys(engine) == []
    await engine.dispose()


async def test_half_of_a_budget_cannot_be_taken_away(sqlite_url: str) -> None:
    engine = create_engine(sqlite_url)
    await create_key(engine, "a", PEPPER, Grant(policy=BUDGET), ME)
    for change in ({"budget_nano_usd": None}, {"budget_period": None}):
        with pytest.raises(InvalidField, match="budget"):
            await update_key(engine, "a", change, ME)
    changed = await update_key(engine, "a", {"budget_nano_usd": None, "budget_period": None}, ME)
    assert changed.policy == NO_POLICY
    await engine.dispose()


@pytest.mark.parametrize(
    ("grant", "field"),
    [(Grant("nobody"), "team"), (Grant(scopes=("root",)), "scopes"), (Grant(scopes=()), "scopes")],
)
async def test_a_bad_grant_is_refused_by_its_field(sqlite_url: str, grant: Grant, field: str) -> None:
    engine = create_engine(sqlite_url)
    with pytest.raises(InvalidField) as refused:
        await create_key(engine, "a", PEPPER, grant)
    assert refused.value.field == field
    await engine.dispose()


def test_models_are_those_configured_and_an_end_lies_ahead() -> None:
    names = {"small": "small", "short": "small", "large": "large"}
    assert checked_grant({"models": ["short", "small", "large"]}, names, 5)["models"] == ("small", "large")
    assert checked_grant({"models": None, "expires_unix_ms": 6}, names, 5) == {"models": None, "expires_unix_ms": 6}
    for wrong, said in (
        ({"models": ["tiny"]}, "models: 'tiny' is not configured. Configured models: large, short, small"),
        ({"models": []}, "models: must have at least one model"),
        ({"expires_unix_ms": 5}, "expires_unix_ms: must be in the future"),
    ):
        with pytest.raises(InvalidField, match=said):
            checked_grant(wrong, names, 5)
