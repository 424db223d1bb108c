"""Names and ids of keys, teams and organisations: what is stored, what is refused, what a reference means."""

from collections.abc import AsyncIterator

import pytest
from pydantic import SecretStr
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncEngine

from db.accounts.errors import InvalidName, NameTaken, UnknownKey, UnknownOrganisation, UnknownTeam
from db.accounts.keys import create_key, find_key, list_keys, revoke_key, update_key
from db.accounts.teams import (
    checked_name,
    create_organisation,
    create_team,
    find_team,
    list_organisations,
    list_teams,
    means,
    rename_organisation,
    update_team,
)
from db.engine import create_engine

PEPPER = SecretStr("p" * 64)
ME = "user:me"
COMPOSED, DECOMPOSED = "Zoé", "Zoe\u0301"


@pytest.fixture
async def engine(database_url: str) -> AsyncIterator[AsyncEngine]:
    engine = create_engine(database_url)
    yield engine
    await engine.dispose()


async def named_by_an_older_release(engine: AsyncEngine, table: str, object_id: str, name: str) -> None:
    async with engine.begin() as connection:
        statement = text(f"UPDATE {table} SET name = :name WHERE id = :id")  # a constant
        await connection.execute(statement.bindparams(name=name, id=object_id))


@pytest.mark.parametrize(
    ("given", "stored"),
    [
        ("alice", "alice"),
        ("  alice ", "alice"),
        ("\u00a0alice\n", "alice"),
        ("team a", "team a"),
        (DECOMPOSED, COMPOSED),
        ("\u212b", "\u00c5"),
        ("keys", "keys"),
        ("teamwork", "teamwork"),
        ("my_key_1", "my_key_1"),
        ("..a", "..a"),
        ("e\u0301" * 100, "é" * 100),
    ],
)
def test_a_name_is_stored_stripped_and_composed(given: str, stored: str) -> None:
    assert checked_name(given) == stored


@pytest.mark.parametrize("prefix", ["key_", "team_", "org_", "KEY_", "Team_", " key_"])
def test_a_name_like_an_id_is_refused(prefix: str) -> None:
    with pytest.raises(InvalidName, match="must not start with the prefix of an id: key_, team_, org_"):
        checked_name(f"{prefix}x")


@pytest.mark.parametrize(
    "name", ["a/b", "/", ".", "..", "", " ", "\n", "a\nb", "a\x00", "x" * 101, "\ud800", "a\u200bb"]
)
def test_a_name_that_no_url_and_no_line_can_hold_is_refused(name: str) -> None:
    with pytest.raises(InvalidName, match="name: must"):
        checked_name(name)


@pytest.mark.parametrize(
    ("reference", "meant"),
    [
        ("key_1", True), ("key_", False), ("alice", True), (" alice", True), ("Alice", False), ("", False),
    ],
)  # fmt: skip
def test_what_a_reference_means(reference: str, meant: bool) -> None:
    assert means(reference, "key_1", "alice") is meant
    assert not means("key_1", "key_2", "key_1")


async def test_every_way_to_a_name_checks_it(engine: AsyncEngine) -> None:
    key, _ = await create_key(engine, f" {DECOMPOSED} ", PEPPER)
    team = await create_team(engine, f" {DECOMPOSED} ", ME)
    owner = await create_organisation(engine, f" {DECOMPOSED} ", ME)
    assert {key.name, team.name, owner.name} == {COMPOSED}
    for refused in ("key_a", "team_a", "org_a", "a/b"):
        for attempt in (
            create_key(engine, refused, PEPPER),
            update_key(engine, COMPOSED, {"name": refused}, ME),
            create_team(engine, refused, ME),
            update_team(engine, COMPOSED, {"name": refused}, ME),
            create_organisation(engine, refused, ME),
            rename_organisation(engine, COMPOSED, refused, ME),
        ):
            with pytest.raises(InvalidName):
                await attempt
    assert (await update_key(engine, DECOMPOSED, {"name": f" {DECOMPOSED}"}, ME)).name == COMPOSED
    assert (await update_team(engine, DECOMPOSED, {"name": "b "}, ME)).name == "b"
    assert (await rename_organisation(engine, DECOMPOSED, "b ", ME)).name == "b"


async def test_names_that_look_the_same_are_the_same(engine: AsyncEngine) -> None:
    """Rows of older releases too, which hold what was typed."""
    key, _ = await create_key(engine, "a", PEPPER)
    team, owner = await create_team(engine, "a", ME), await create_organisation(engine, "a", ME)
    for table, object_id in (
        ("api_keys", key.key_id),
        ("teams", team.team_id),
        ("organisations", owner.organisation_id),
    ):
        await named_by_an_older_release(engine, table, object_id, f"{DECOMPOSED} ")
    await create_key(engine, "b", PEPPER)
    await create_team(engine, "b", ME)
    await create_organisation(engine, "b", ME)
    for attempt in (
        create_key(engine, COMPOSED, PEPPER),
        update_key(engine, "b", {"name": COMPOSED}, ME),
        create_team(engine, COMPOSED, ME),
        update_team(engine, "b", {"name": COMPOSED}, ME),
        create_organisation(engine, COMPOSED, ME),
        rename_organisation(engine, "b", COMPOSED, ME),
    ):
        with pytest.raises(NameTaken):
            await attempt
    assert (await find_key(engine, COMPOSED)).key_id == key.key_id
    assert (await update_key(engine, COMPOSED, {"name": COMPOSED}, ME)).name == COMPOSED
    assert (await update_team(engine, COMPOSED, {"name": COMPOSED}, ME)).team_id == team.team_id
    assert (await rename_organisation(engine, COMPOSED, COMPOSED, ME)).organisation_id == owner.organisation_id


async def test_revoking_by_id_touches_that_id_only(engine: AsyncEngine) -> None:
    victim, _ = await create_key(engine, "victim", PEPPER)
    other, _ = await create_key(engine, "other", PEPPER)
    await named_by_an_older_release(engine, "api_keys", other.key_id, victim.key_id)
    assert (await update_key(engine, victim.key_id, {"weight": 2.0}, ME)).key_id == victim.key_id
    assert (await revoke_key(engine, victim.key_id)).key_id == victim.key_id
    with pytest.raises(UnknownKey, match=f"the key {victim.key_id} is revoked"):
        await revoke_key(engine, victim.key_id)
    assert [key.key_id for key in await list_keys(engine)] == [other.key_id]
    # The one with that name is changed by its id, and its name need not be changed with it.
    unchanged = {"name": victim.key_id, "weight": 3.0}
    assert (await update_key(engine, other.key_id, unchanged, ME)).policy.weight == 3.0
    assert (await revoke_key(engine, other.key_id[:12])).key_id == other.key_id


async def test_a_name_like_an_id_is_no_prefix_of_one(engine: AsyncEngine) -> None:
    victim, _ = await create_key(engine, "victim", PEPPER)
    other, _ = await create_key(engine, "other", PEPPER)
    name = victim.key_id[:8]
    await named_by_an_older_release(engine, "api_keys", other.key_id, name)
    with pytest.raises(
        UnknownKey, match=f"no active key has the id '{name}'. The active key with this name has the id {other.key_id}"
    ):
        await revoke_key(engine, name)
    assert len(await list_keys(engine)) == 2


async def test_a_team_and_an_organisation_are_meant_by_id_first(engine: AsyncEngine) -> None:
    a, b = await create_team(engine, "a", ME), await create_team(engine, "b", ME)
    c, d = await create_organisation(engine, "c", ME), await create_organisation(engine, "d", ME)
    await named_by_an_older_release(engine, "teams", b.team_id, a.team_id)
    await named_by_an_older_release(engine, "teams", a.team_id, "team_legacy")
    await named_by_an_older_release(engine, "organisations", d.organisation_id, c.organisation_id)
    await named_by_an_older_release(engine, "organisations", c.organisation_id, "org_legacy")
    async with engine.connect() as connection:
        assert (await find_team(connection, a.team_id)).team_id == a.team_id
        with pytest.raises(UnknownTeam, match=f"The team with this name has the id {a.team_id}"):
            await find_team(connection, "team_legacy")
    with pytest.raises(UnknownOrganisation, match=f"The organization with this name has the id {c.organisation_id}"):
        await rename_organisation(engine, "org_legacy", "e", ME)
    assert (await update_team(engine, a.team_id, {"name": "e"}, ME)).team_id == a.team_id
    assert (await rename_organisation(engine, c.organisation_id, "e", ME)).organisation_id == c.organisation_id
    assert {team.name for team in await list_teams(engine)} == {"default", a.team_id, "e"}
    assert {owner.name for owner in await list_organisations(engine)} == {"default", c.organisation_id, "e"}
