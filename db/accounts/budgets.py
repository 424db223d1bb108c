"""Warnings about budgets: tokens of models without a price do not count."""

from collections.abc import Collection, Iterable
from typing import Final

from db.accounts.principal import Policy
from db.money import CLIENTS
from db.prices import PriceBook

MAX_NAMED: Final = 10  # models in one warning


def unpriced_models(models: Iterable[str], configured: Collection[str], book: PriceBook, now_unix_ms: int) -> list[str]:
    """Return the models without a current price for clients; ``configured``: those with a configured price."""
    return [name for name in models if name not in configured and not _is_priced(name, book, now_unix_ms)]


def _is_priced(model: str, book: PriceBook, now_unix_ms: int) -> bool:
    price = book.at(model, CLIENTS, now_unix_ms)
    return price is not None and price.tokens is not None


def budget_warnings(policy: Policy, usable: Collection[str] | None, unpriced: Iterable[str]) -> list[str]:
    """Return warnings about a budget, as sentences; ``usable``: the models that its requests may use, None: all."""
    without = [name for name in unpriced if usable is None or name in usable]
    if policy.budget_nano_usd is None or not without:
        return []
    named = ", ".join(f"`{name}`" for name in without[:MAX_NAMED])
    more = f" and {len(without) - MAX_NAMED} more" if len(without) > MAX_NAMED else ""
    price = f"prompt and completion in [models.{without[0]}.price]"
    return [f"The budget does not limit requests to {named}{more}: no price is set. Set {price}."]
