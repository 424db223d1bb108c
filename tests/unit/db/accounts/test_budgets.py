"""Warnings about budgets on models without a price."""

import pytest

from db.accounts.budgets import MAX_NAMED, budget_warnings, unpriced_models
from db.accounts.principal import Policy
from db.money import Price
from db.prices import NO_PRICE, PriceBook

BUDGET = Policy(budget_nano_usd=10, budget_period="day")
PRICED = Price(prompt_nano_usd=1)


def test_a_price_may_be_configured_entered_or_ended() -> None:
    book = PriceBook([("entered", "", 0, PRICED), ("ended", "", 0, PRICED), ("ended", "", 5, NO_PRICE)])
    models = ("configured", "entered", "ended", "none")
    assert unpriced_models(models, {"configured"}, book, 10) == ["ended", "none"]
    assert unpriced_models(models, {"configured"}, book, 4) == ["none"]


@pytest.mark.parametrize(
    ("policy", "usable", "named"),
    [
        (BUDGET, None, "`a`, `b`: no price"),
        (BUDGET, ("b", "priced"), "`b`: no price"),
        (BUDGET, ("priced",), None),
        (Policy(), None, None),
    ],
)
def test_a_budget_names_the_models_that_it_does_not_limit(
    policy: Policy, usable: tuple[str, ...] | None, named: str | None
) -> None:
    warnings = budget_warnings(policy, usable, ["a", "b"])
    assert len(warnings) == (named is not None)
    assert named is None or named in warnings[0]


def test_of_many_models_some_are_named() -> None:
    [text] = budget_warnings(BUDGET, None, [f"m{number}" for number in range(MAX_NAMED + 3)])
    assert "`m9` and 3 more: no price is set. Set prompt and completion in [models.m0.price]." in text
