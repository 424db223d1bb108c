"""Money and prices. Amounts are stored and summed as integer nano-USD; users read and write USD.

Imports no SQL, because the settings of every process contain prices.
"""

from dataclasses import dataclass
from decimal import Decimal
from typing import Final, overload

NANO_USD: Final = 1_000_000_000  # in one USD
MILLION: Final = 1_000_000
CLIENTS: Final = ""  # in place of a pool: the price that clients are charged
MACHINE: Final = ""  # in place of a model: the price of a pool's machines


@overload
def nano_usd(usd: float | Decimal) -> int: ...
@overload
def nano_usd(usd: float | Decimal | None) -> int | None: ...
def nano_usd(usd: float | Decimal | None) -> int | None:
    """Round to the nearest whole nano-USD; None stays None."""
    return None if usd is None else round(usd * NANO_USD)


def usd_text(nano: int) -> str:
    """Return the exact amount in USD with at least two decimals: ``12.50``, ``0.000000001``."""
    whole, part = divmod(abs(nano), NANO_USD)
    decimals = f"{part:09}".rstrip("0").ljust(2, "0")
    return f"{'-' if nano < 0 else ''}{whole}.{decimals}"


def charge_text(charge: int, unpriced_tokens: int) -> str:
    """Return the exact charge: ``$0.000123``. Tokens without a price show as ``no price``, not as $0.00."""
    if not unpriced_tokens:
        return f"${usd_text(charge)}"
    return f"${usd_text(charge)} + no price" if charge else "no price"


@dataclass(frozen=True, slots=True)
class TokenPrice:
    """Nano-USD per million tokens of each kind. Cached tokens are part of the prompt tokens."""

    prompt_nano_usd: int
    cached_nano_usd: int
    completion_nano_usd: int

    def charge_nano_usd(self, prompt_tokens: int, cached_tokens: int, completion_tokens: int) -> int:
        """Return the cost of a request, rounded to the nearest nano-USD."""
        millionths = (
            (prompt_tokens - cached_tokens) * self.prompt_nano_usd
            + cached_tokens * self.cached_nano_usd
            + completion_tokens * self.completion_nano_usd
        )
        return (millionths + MILLION // 2) // MILLION


@dataclass(frozen=True, slots=True)
class Price:
    """A row of the price book without its date: NULLs are None."""

    prompt_nano_usd: int | None = None
    cached_nano_usd: int | None = None
    completion_nano_usd: int | None = None
    machine_nano_usd: int | None = None
    on_demand_nano_usd: int | None = None

    @property
    def tokens(self) -> TokenPrice | None:
        """The token prices; None if there are none."""
        if self.prompt_nano_usd is None and self.completion_nano_usd is None:
            return None
        prompt = self.prompt_nano_usd or 0
        cached = prompt if self.cached_nano_usd is None else self.cached_nano_usd
        return TokenPrice(prompt, cached, self.completion_nano_usd or 0)


@dataclass(frozen=True, slots=True)
class ConfiguredPrice:
    """A price in spillway.toml: of a model's tokens for clients (no pool) or at a hosted pool, or of a pool's machines.

    The price of machines has no model.
    """

    model: str
    pool: str
    price: Price
