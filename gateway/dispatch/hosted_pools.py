"""All hosted pools: which of them may and can take a request, the cheapest first."""

import time
from collections.abc import Callable, Collection, Mapping
from typing import Final, NamedTuple

from db.money import TokenPrice
from gateway.admission.capacity import Capacity
from gateway.dispatch.hosted_pool import HostedPool, most_cost_nano_usd
from gateway.dispatch.hosted_slot import HostedSlot
from gateway.limits.leases import Quotas, Refused, Unavailable
from gateway.limits.prices import POOL, CurrentPrices
from gateway.settings import HostedPoolSettings

# Why a request that may go to a hosted pool does not: what its caller is told while it waits.
AWAY: Final = "away"  # none of these pools has a worker, or all rest
FULL: Final = "full"
CAP_REACHED: Final = "cap-reached"


class HostedDemand(NamedTuple):
    """A request's demand on a hosted pool."""

    model: str
    providers: tuple[str, ...]  # to which it may go
    prompt_tokens: int
    completion_tokens: int  # that it may still make, over all choices
    sequences: int
    unix_ms: int  # when it was received: the prices of then count


class Offer(NamedTuple):
    """A pool that has capacity, and the most that the request may cost there."""

    pool: HostedPool
    price: TokenPrice | None
    nano_usd: int


class HostedPools:
    """For use from the event loop only."""

    def __init__(
        self, pools: Mapping[str, HostedPoolSettings], capacity: Capacity, quotas: Quotas, prices: CurrentPrices
    ) -> None:
        self._pools = [
            HostedPool(name, settings, {model: capacity.hosted(name, model) for model in settings.models})
            for name, settings in pools.items()
        ]
        self._quotas = quotas
        self._prices = prices
        for pool in self._pools:
            for account_id, terms in pool.caps:
                quotas.keep(POOL, account_id, terms)

    def offer(
        self, wanted: HostedDemand, tried: Collection[str] = (), fits: Callable[[HostedPool], bool] | None = None
    ) -> Offer | str:
        """Return the cheapest pool that has capacity, or why there is none. From memory.

        ``tried``: pools on which the request has failed; ``fits``: whether what is made already can go on there.
        """
        now_s, why, best = time.monotonic(), AWAY, None
        for pool in self._pools:
            if wanted.model not in pool.models or pool.provider not in wanted.providers or pool.name in tried:
                continue
            price = self._prices.of(wanted.model, wanted.unix_ms, pool.name)
            cost = most_cost_nano_usd(price, wanted.prompt_tokens, wanted.completion_tokens)
            if pool.is_away(wanted.model, now_s) or (fits is not None and not fits(pool)):
                continue
            if pool.is_shut(cost, now_s) or (pool.caps and price is None):
                why = CAP_REACHED
            elif not pool.has_room(wanted.model, wanted.sequences):
                why = FULL if why == AWAY else why
            elif best is None or cost < best.nano_usd:
                best = Offer(pool, price, cost)
        return best or why

    async def take(self, offer: Offer, sequences: int) -> HostedSlot | None:
        """Reserve what was offered just now, with the money; None: the caps do not hold it."""
        pool, price, cost = offer
        pool.promised += sequences
        try:
            reservation = await self._quotas.reserve_money(pool.caps, cost, price)
        except (Refused, Unavailable) as error:
            pool.promised -= sequences
            pool.shut(cost if isinstance(error, Refused) else 0, time.monotonic())
            return None
        except BaseException:
            pool.promised -= sequences
            raise
        return HostedSlot(pool, sequences, reservation)
