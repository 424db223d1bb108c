"""Money: whole nano-USD wherever it is stored or added up; people write and read USD."""

from decimal import Decimal
from typing import Final, overload

NANO_USD: Final = 1_000_000_000  # in one USD


@overload
def nano_usd(usd: float | Decimal) -> int: ...
@overload
def nano_usd(usd: float | Decimal | None) -> int | None: ...
def nano_usd(usd: float | Decimal | None) -> int | None:
    """Round to the nearest whole nano-USD; None stays None."""
    return None if usd is None else round(usd * NANO_USD)
