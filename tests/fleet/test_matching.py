"""Who owns which machine, also where machines carry no label of ours."""

import random

import pytest

from fleet.machine import (
    MACHINE_LABEL,
    Machine,
    ProviderMachine,
    State,
    labels_in,
    labels_of,
    name_of,
    new_machine_id,
)
from fleet.matching import match

FLEET, POOL = "fleet", "gpu"


def row(machine_id: str, provider_id: str | None = None, state: State = State.LAUNCHED, at: int = 0) -> Machine:
    return Machine(machine_id, POOL, "", state, wanted_unix_ms=at, provider_id=provider_id)


def there(provider_id: str, machine_id: str | None = None, *, is_ending: bool = False) -> ProviderMachine:
    return ProviderMachine(provider_id, {} if machine_id is None else {MACHINE_LABEL: machine_id}, is_ending)


def test_a_label_says_whose_a_machine_is_and_else_the_providers_id_does() -> None:
    matched = match([row("m-1"), row("m-2", "i-2")], [there("i-1", "m-1"), there("i-2"), there("i-3")])
    assert matched.owned == {"m-1": there("i-1", "m-1"), "m-2": there("i-2")}
    assert matched.unowned == (there("i-3"),)


def test_what_is_ending_is_nobodys_business_unless_somebody_owns_it() -> None:
    matched = match([row("m-1")], [there("i-1", "m-1", is_ending=True), there("i-2", "m-9", is_ending=True)])
    assert matched.owned.keys() == {"m-1"}
    assert matched.unowned == ()


@pytest.mark.parametrize("known", [None, "i-1", "i-2"])
def test_of_two_machines_for_one_row_one_is_nobodys(known: str | None) -> None:
    matched = match([row("m-1", known)], [there("i-1", "m-1"), there("i-2", "m-1")])
    kept = known or "i-1"
    assert matched.owned["m-1"].provider_id == kept
    assert [one.provider_id for one in matched.unowned] == [other for other in ("i-1", "i-2") if other != kept]


def test_the_one_of_two_that_stays_is_the_row_s() -> None:
    matched = match([row("m-1")], [there("i-1", "m-1", is_ending=True), there("i-2", "m-1")])
    assert matched.owned["m-1"].provider_id == "i-2"


def test_launches_without_an_answer_get_the_machines_without_a_label_the_oldest_first() -> None:
    rows = [row("m-b", state=State.WANTED, at=2), row("m-a", state=State.WANTED, at=1), row("m-c", "i-0")]
    matched = match(rows, [there("i-9"), there("i-0")])
    assert {machine_id: one.provider_id for machine_id, one in matched.owned.items()} == {"m-a": "i-9", "m-c": "i-0"}
    assert matched.unowned == ()


def test_a_machine_with_the_label_of_a_row_that_is_over_is_given_to_nobody() -> None:
    matched = match([row("m-2", state=State.WANTED)], [there("i-1", "m-1")])
    assert matched.owned == {}
    assert matched.unowned == (there("i-1", "m-1"),)


def test_two_rows_never_own_the_same_machine() -> None:
    matched = match([row("m-1", "i-1", at=1), row("m-2", "i-1", at=2)], [there("i-1")])
    assert matched.owned.keys() == {"m-1"}


@pytest.mark.parametrize("seed", range(50))
def test_nothing_is_lost_or_owned_twice(seed: int) -> None:
    chance = random.Random(seed)
    rows = [
        row(
            f"m-{number}",
            chance.choice([None, f"i-{chance.randrange(8)}"]),
            chance.choice([State.WANTED, State.SERVING]),
        )
        for number in range(chance.randrange(6))
    ]
    listed = [
        there(f"i-{number}", chance.choice([None, f"m-{chance.randrange(6)}"]), is_ending=chance.random() < 0.2)
        for number in chance.sample(range(8), chance.randrange(8))
    ]
    matched = match(rows, listed)
    owned = [one.provider_id for one in matched.owned.values()]
    unowned = [one.provider_id for one in matched.unowned]
    assert matched.owned.keys() <= {one.machine_id for one in rows}
    assert len(owned + unowned) == len({*owned, *unowned})
    assert {one.provider_id for one in listed if not one.is_ending} <= {*owned, *unowned}
    chance.shuffle(rows)
    chance.shuffle(listed)
    assert match(rows, listed) == matched  # whatever order they come in


def test_a_name_says_what_labels_do() -> None:
    labels = labels_of(FLEET, new_machine_id(), POOL)
    assert labels_in(name_of(labels), FLEET, POOL) == labels


@pytest.mark.parametrize(
    "name",
    [
        "my pod",
        "",
        "spillway.fleet.gpu.",
        "spillway.fleet.gpu.m-1",
        "spillway.fleet.gpu.x.m-0123456789abcdef",  # of the pool gpu.x
        "spillway.fleet-2.gpu.m-0123456789abcdef",
        "spillway.fleet.gpu2.m-0123456789abcdef",
        "other.spillway.fleet.gpu.m-0123456789abcdef",
    ],
)
def test_no_other_name_is_ours(name: str) -> None:
    assert labels_in(name, FLEET, POOL) is None
