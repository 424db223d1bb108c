"""Hosted pools: whether one can take a request now, and its spending caps. docs/how-to/hosted.md, docs/adr/0011."""

import math
import time
from collections.abc import Callable, Collection, Mapping
from typing import Final, NamedTuple

from db.accounts.principal import Limits
from db.money import TokenPrice, nano_usd
from gateway.admission.capacity import Capacity, ModelCapacity
from gateway.limits.leases import LimitReached, Quotas, Unavailable
from gateway.limits.prices import POOL, CurrentPrices, cap_account
from gateway.limits.reservation import Reservation
from gateway.settings import HostedPoolSettings
from protocol import subjects
from protocol.gateways import Kind
from protocol.job import Failed, Finished

# --- hosted pool ------------------------------------------------------------------------------------------------------
#
# One hosted pool: its capacity from heartbeats, its caps from the accounts that gateways share.

# Providers count prompts with their own tokenizers: the reserved cost is this multiple of the gateway's count.
PROMPT_MARGIN: Final = 1.25
PAUSE_S: Final = 5.0  # a pool that did not accept a job in time gets none for this long
CAP_RETRY_S: Final = 1.0  # before an amount that a cap refused is tried again


def caps_of(name: str, settings: HostedPoolSettings) -> tuple[tuple[str, Limits], ...]:
    """Return the accounts of a pool's caps with their limits."""
    return tuple(
        (cap_account(name, period), Limits((None, None, None, nano_usd(usd)), period))
        for period, usd in settings.caps.items()
    )


class HostedPool:
    """One hosted pool. Only for use in the event loop."""

    def __init__(self, name: str, settings: HostedPoolSettings, capacities: dict[str, ModelCapacity]) -> None:
        """``capacities``: by model."""
        self.name = name
        self.provider = settings.provider
        self.models = frozenset(settings.models)
        self.lane = subjects.hosted_lane(name)
        self.caps = caps_of(name, settings)
        self.promised = 0  # sequences of published attempts that heartbeats do not include yet
        self._capacities = capacities
        self._paused_until_s = 0.0  # monotonic clock
        self._refused_until_s = 0.0
        self._refused_nano_usd = 0

    def is_unavailable(self, model: str, now_s: float) -> bool:
        """Return whether none of its workers is alive, or it pauses after a failure."""
        return now_s < self._paused_until_s or not self._capacities[model].workers

    def has_room(self, model: str, sequences: int) -> bool:
        """Return whether its workers have this many free sequences."""
        return self._capacities[model].free_sequences - self.promised >= sequences

    def is_over_cap(self, needed_nano_usd: int, now_s: float) -> bool:
        """Return whether an amount exceeds a cap, or its caps recently refused it."""
        caps = (terms.limits[Kind.MONEY] or 0 for _, terms in self.caps)
        too_expensive = any(needed_nano_usd > cap for cap in caps)
        return too_expensive or (now_s < self._refused_until_s and needed_nano_usd >= self._refused_nano_usd)

    def note_cap_refusal(self, needed_nano_usd: int, now_s: float) -> None:
        """Note that its caps refused this amount: do not ask again for a while."""
        self._refused_until_s, self._refused_nano_usd = now_s + CAP_RETRY_S, needed_nano_usd

    def pause(self, now_s: float) -> None:
        """Note that it did not accept a job in time."""
        self._paused_until_s = now_s + PAUSE_S


def max_cost_nano_usd(price: TokenPrice | None, prompt_tokens: int, completion_tokens: int) -> int:
    """Return the most that a request may cost the operator, from the gateway's token counts."""
    return 0 if price is None else price.charge_nano_usd(math.ceil(prompt_tokens * PROMPT_MARGIN), 0, completion_tokens)


# --- hosted slot ------------------------------------------------------------------------------------------------------
#
# The slot that one attempt holds of a hosted pool: capacity, and money of its caps. It must be released exactly once.


class HostedSlot:
    """The slot of one attempt. Its methods are idempotent: only the first that closes it counts."""

    __slots__ = ("_counts", "_holds_room", "_reservation", "_sequences", "made_s", "pool")

    def __init__(self, pool: HostedPool, sequences: int, reservation: Reservation) -> None:
        """``sequences``: already included in the pool's ``promised``."""
        self.pool = pool
        self.made_s = time.monotonic()
        self._sequences = sequences
        self._reservation = reservation
        self._holds_room = True
        self._counts: tuple[int, int, int] | None = None  # from the worker's final frame

    def take_final_frame(self, frame: Finished | Failed) -> None:
        """Note the counts of the attempt's final frame. An attempt that failed before its first token costs nothing."""
        if isinstance(frame, Finished):
            self._counts = (frame.prompt_tokens, frame.cached_tokens, frame.completion_tokens)
        elif not frame.completion_tokens:
            self._counts = (0, 0, 0)

    def release_capacity(self) -> None:
        """Release the capacity: a worker accepted the attempt and reports it in heartbeats, or the attempt ended."""
        if self._holds_room:
            self._holds_room = False
            self.pool.promised -= self._sequences

    def settle(self) -> None:
        """Settle the attempt's cost; if unknown, the reserved amount."""
        self.release_capacity()
        if self._counts is None:
            self._reservation.settle_in_full()
        else:
            self._reservation.settle(*self._counts)

    def refund(self) -> None:
        """Refund the attempt: no worker ran it."""
        self.release_capacity()
        self._reservation.refund()


# --- hosted pools -----------------------------------------------------------------------------------------------------
#
# All hosted pools: the cheapest one that can take a request.

# Why a request is not at a hosted pool although it may be, as reported to its client while it waits.
AWAY: Final = "away"  # no pool has a worker, or all pause
FULL: Final = "full"
CAP_REACHED: Final = "cap-reached"


class HostedDemand(NamedTuple):
    """What a request needs of a hosted pool."""

    model: str
    providers: tuple[str, ...]  # that it may use
    prompt_tokens: int
    completion_tokens: int  # that it may still generate, over all choices
    sequences: int
    unix_ms: int  # when it was received, for the price


class Offer(NamedTuple):
    """A pool with capacity, and the most that the request may cost there."""

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
        """Return the cheapest pool with capacity, or why there is none. From memory.

        ``tried``: pools on which the request failed; ``fits``: whether a pool can continue what is held.
        """
        now_s, why, best = time.monotonic(), AWAY, None
        for pool in self._pools:
            if wanted.model not in pool.models or pool.provider not in wanted.providers or pool.name in tried:
                continue
            price = self._prices.of(wanted.model, wanted.unix_ms, pool.name)
            cost = max_cost_nano_usd(price, wanted.prompt_tokens, wanted.completion_tokens)
            if pool.is_unavailable(wanted.model, now_s) or (fits is not None and not fits(pool)):
                continue
            if pool.is_over_cap(cost, now_s) or (pool.caps and price is None):
                why = CAP_REACHED
            elif not pool.has_room(wanted.model, wanted.sequences):
                why = FULL if why == AWAY else why
            elif best is None or cost < best.nano_usd:
                best = Offer(pool, price, cost)
        return best or why

    async def take(self, offer: Offer, sequences: int) -> HostedSlot | None:
        """Reserve an offer and its cost; None: the caps refuse it."""
        pool, price, cost = offer
        pool.promised += sequences
        try:
            reservation = await self._quotas.reserve_money(pool.caps, cost, price)
        except (LimitReached, Unavailable) as error:
            pool.promised -= sequences
            pool.note_cap_refusal(cost if isinstance(error, LimitReached) else 0, time.monotonic())
            return None
        except BaseException:
            pool.promised -= sequences
            raise
        return HostedSlot(pool, sequences, reservation)
