"""The reservation of one admitted request, which is settled or refunded once."""

from msgspec import Struct

from db.accounts.principal import plus
from db.money import TokenPrice
from gateway.limits.local import LocalAccount, Taken
from protocol.gateways import NOTHING, Amounts


class Estimate(Struct, frozen=True):
    """The most that a request can use."""

    prompt_tokens: int
    completion_tokens: int  # max_tokens of all choices together
    price: TokenPrice | None = None  # None: free

    @property
    def amounts(self) -> Amounts:
        """Amounts to reserve, without the discount for cached tokens, which is unknown before the end."""
        tokens = self.prompt_tokens + self.completion_tokens
        return 1, tokens, 1, charge_of(self.price, self.prompt_tokens, 0, self.completion_tokens)


class Reservation:
    """The amounts that one request holds. Only the first ``settle`` or ``refund`` counts."""

    __slots__ = ("_is_open", "_more", "_price", "_taken", "amounts", "local_accounts")

    def __init__(self, amounts: Amounts, taken: list[tuple[LocalAccount, Taken]], price: TokenPrice | None) -> None:
        self.amounts = amounts
        self.local_accounts = tuple(local for local, _ in taken)
        self._taken = taken
        self._more: list[tuple[LocalAccount, Taken]] = []  # reserved later
        self._price = price
        self._is_open = True

    def enlarge(self, amounts: Amounts, taken: list[tuple[LocalAccount, Taken]], price: TokenPrice | None) -> None:
        """Add amounts once the request's size is known better."""
        self.amounts = plus(self.amounts, amounts)
        self.local_accounts = tuple(local for local, _ in taken)
        self._more += taken
        self._price = price

    def release_concurrency(self) -> None:
        """Release the concurrent request; its use is settled later."""
        for local, taken in (*self._taken, *self._more):
            local.slice.release_concurrency(taken)
            local.wake()

    def settle(self, prompt_tokens: int, cached_tokens: int, completion_tokens: int) -> None:
        """Settle an ended request with its use."""
        charge = charge_of(self._price, prompt_tokens, cached_tokens, completion_tokens)
        self._close((1, prompt_tokens + completion_tokens, 0, charge))

    def settle_in_full(self) -> None:
        """Settle an ended request of unknown use with the reserved amounts."""
        self._close(self.amounts)

    def refund(self) -> None:
        """Return all amounts, because the request was not admitted."""
        self._close(NOTHING)

    def _close(self, actual: Amounts) -> None:
        if not self._is_open:
            return
        self._is_open = False
        for local, taken in self._taken:
            local.slice.settle(taken, local.terms.needs(actual), local.clock.now_s())
            local.wake()
        for local, taken in self._more:  # the use was settled above
            local.slice.settle(taken, NOTHING, local.clock.now_s())
            local.wake()


def charge_of(price: TokenPrice | None, prompt_tokens: int, cached_tokens: int, completion_tokens: int) -> int:
    """Nano-USD."""
    return 0 if price is None else price.charge_nano_usd(prompt_tokens, cached_tokens, completion_tokens)
