"""Limits of keys and teams at this gateway: requests reserve from memory; exchanges happen in the background.

Only a request whose slice is too small waits, for one exchange with the bucket, at most ``SLICE_WAIT_S``.
"""

import asyncio
import logging
import time
from collections.abc import Iterable, Sequence
from functools import reduce
from typing import Final

from nats.aio.msg import Msg

from db.accounts.principal import Limits, Principal, limits_of, minus, plus
from db.engine import DatabaseUnavailable
from db.money import TokenPrice
from gateway.limits.account import EMPTY, LEASE_S, AccountStore, created_s
from gateway.limits.local import LocalAccount, Refusal, too_large
from gateway.limits.prices import POOL
from gateway.limits.report import LimitUsage, taken_amounts, uses
from gateway.limits.reservation import Estimate, Reservation
from gateway.limits.seeds import Ledger, Seed, Unseeded, check_nobody_holds, until_ledger_is_current
from gateway.limits.single_tasks import SingleTasks
from gateway.settings import REACH_LIMIT_S
from protocol import subjects
from protocol.errors import BusError, ProtocolError
from protocol.gateways import Amounts, Kind
from protocol.nats.bus import Bus

SLICE_WAIT_S: Final = 0.1  # how long a request waits for a larger slice
EXCHANGE_GAP_S: Final = 0.02  # between two exchanges of one account
CLOSED_GAP_S: Final = 0.25  # likewise, while no money can be leased from it
REPORT_PERIOD_S: Final = 1.0  # greatest age of this gateway's reports; a fraction of LEASE_S
RENEW_S: Final = LEASE_S / 3
TICK_S: Final = 0.25
KEEP_PERIOD_S: Final = 10.0  # greatest age of a kept account's copy while no request uses it here
FORGET_S: Final = 120.0  # before an unused account that holds nothing is forgotten
MAX_SEEDS: Final = 4  # concurrent queries to the ledger
SEED_LIMIT_S: Final = 5.0
SEED_GAP_S: Final = 0.25  # between two queries for the same account
MAX_EXCHANGES: Final = 32  # concurrent ones, over all accounts
CLOSE_LIMIT_S: Final = 2.0  # for returning all leased amounts

log = logging.getLogger(__name__)


class LimitReached(Exception):
    """Raised when a limit refuses the request."""

    def __init__(self, refusal: Refusal, local_accounts: tuple[LocalAccount, ...]) -> None:
        super().__init__(refusal)
        self.refusal = refusal
        self.local_accounts = local_accounts


class Unavailable(Exception):
    """Raised when the rest of a limit is unknown, because the queue server does not answer."""


class Quotas:
    """Reserves and reports amounts. ``start`` it, run ``run`` as a supervised task, and ``close`` it at the end."""

    def __init__(self, bus: Bus, gateway_id: str, ledger: Ledger, reach_limit_s: float = REACH_LIMIT_S) -> None:
        """``ledger``: source of the spending of a missing account.

        ``reach_limit_s``: how long a request waits for its first slice: the queue server or this process may be busy.
        """
        self._bus = bus
        self._ledger = ledger
        self._started_s = 0.0  # on the queue server's clock
        self._bucket_created_s = 0.0  # on the queue server's clock
        self._refused_budgets: set[str] = set()  # of local accounts, since the last tick
        self._seeding = SingleTasks()  # by account
        self._seed_slots = asyncio.Semaphore(MAX_SEEDS)
        self._clock = bus.clock
        self._gateway_id = gateway_id
        self._account_store = AccountStore(bus, reach_limit_s)
        self._reach_limit_s = reach_limit_s
        self._local_accounts: dict[str, LocalAccount] = {}
        self._asked_s: dict[str, float] = {}  # by account: when a request last used it (monotonic clock)
        self._exchanging = SingleTasks()  # by account
        self._exchange_slots = asyncio.Semaphore(MAX_EXCHANGES)
        self._kept: set[str] = set()  # accounts
        self._failing = False

    async def start(self) -> None:
        """Measure the clock, and subscribe to other gateways' requests for amounts. Raises BusError."""
        await self._clock.measure()
        self._started_s = self._clock.now_s()
        self._bucket_created_s = await created_s(self._bus)
        self._bus.on_reconnect(self._restore_accounts)
        await self._bus.subscribe(subjects.QUOTA_WANTED, self._on_wanted)

    async def run(self) -> None:
        """Report use, renew leases and return unneeded amounts; never returns."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._clock.run(), name="server clock")
            group.create_task(self._watch_bucket(), name="bucket of limits")
            await self._run()

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            await self._tell_refusals()
            now_s = time.monotonic()
            for local in list(self._local_accounts.values()):
                if local.is_idle and local.account_id not in self._kept:
                    self._forget_if_old(local, now_s)
                elif local.is_idle:
                    if now_s - local.exchanged_s >= KEEP_PERIOD_S:
                        self._exchange_soon(local)
                elif now_s - local.exchanged_s >= (REPORT_PERIOD_S if local.slice.is_changed else RENEW_S):
                    self._exchange_soon(local)

    def _forget_if_old(self, local: LocalAccount, now_s: float) -> None:
        account_id = local.account_id
        if now_s - self._asked_s[account_id] > FORGET_S and account_id not in self._exchanging:
            del self._local_accounts[account_id], self._asked_s[account_id]

    def keep(self, whose: str, account_id: str, terms: Limits) -> None:
        """Keep an account's copy up to date from now on, even while no request uses it here."""
        self._kept.add(account_id)
        self._local_account(account_id, whose, terms)

    def kept_uses(self) -> dict[str, tuple[LimitUsage, ...]]:
        """Return the use of the kept accounts by id, as far as this gateway knows it."""
        now_s, local_accounts = (
            self._clock.now_s(),
            [self._local_accounts[account_id] for account_id in sorted(self._kept)],
        )
        return {
            local.account_id: uses(local.terms, taken_amounts(local.known_account(), local.terms, now_s), now_s)
            for local in local_accounts
            if local.exchanged_s > float("-inf")
        }

    async def _watch_bucket(self) -> None:
        """Detect a lost bucket before other gateways start accounts without its contents (``check_nobody_holds``)."""
        while True:
            await asyncio.sleep(RENEW_S)
            try:
                bucket_created_s = await created_s(self._bus)
            except BusError as error:
                log.debug("cannot check the quota bucket: %s", error)
                continue
            if bucket_created_s != self._bucket_created_s:
                self._bucket_created_s = bucket_created_s
                await self._restore_accounts()

    async def _restore_accounts(self) -> None:
        now_s = self._clock.now_s()
        for local in self._local_accounts.values():
            if local.would_be_missed(now_s):
                self._exchange_soon(local)

    async def close(self) -> None:
        """Report everything and return idle amounts within ``CLOSE_LIMIT_S``; the rest ends with its lease."""
        try:
            async with asyncio.timeout(CLOSE_LIMIT_S):
                await self._exchanging.wait()
                for local in self._local_accounts.values():
                    if not local.is_idle:
                        await local.exchange(self._account_store, keep_idle=False)
        except (TimeoutError, BusError, ProtocolError, Unseeded) as error:
            log.warning(
                "cannot return leased limits; they return when their leases expire: %s", str(error) or "too slow"
            )
        finally:
            self._exchanging.cancel()
            self._seeding.cancel()

    # --- requests -----------------------------------------------------------------------------------------------------

    async def reserve(
        self, principal: Principal, estimates: Sequence[Estimate], held: Reservation | None = None
    ) -> list[Reservation] | None:
        """Reserve the most that requests can use of the key's and the team's limits; None: there are none.

        ``held``: the existing reservation of the first request, which is enlarged. All or nothing: raises LimitReached
        or Unavailable.
        """
        key, team = limits_of(principal.key_policy), limits_of(principal.team_policy)
        if key is None and team is None:
            return None
        amounts = [estimate.amounts for estimate in estimates]
        if held is not None:
            amounts[0] = minus(amounts[0], held.amounts)
        accounts = (("key", principal.key_id, key), ("team", principal.team_id, team))
        claims = self._claims(accounts, reduce(plus, amounts))
        now_s = await self._until_held(claims)
        local_accounts = [local for local, _ in claims]
        reservations = [] if held is None else [held]
        for one, estimate in zip(amounts, estimates, strict=True):
            taken = [(local, local.slice.take(local.terms.needs(one), now_s)) for local in local_accounts]
            if held is not None:
                held.enlarge(one, taken, estimate.price)
                held = None
            else:
                reservations.append(Reservation(one, taken, estimate.price))
        self._refill(local_accounts)
        return reservations

    async def reserve_money(
        self, accounts: Iterable[tuple[str, Limits]], nano_usd: int, price: TokenPrice | None
    ) -> Reservation:
        """Reserve the cost of a request at a pool from each of its accounts. Raises LimitReached or Unavailable.

        Without accounts there is no cap, and the reservation is empty.
        """
        amounts = (0, 0, 0, nano_usd)
        claims = self._claims([(POOL, account_id, terms) for account_id, terms in accounts], amounts)
        now_s = await self._until_held(claims)
        reservation = Reservation(amounts, [(local, local.slice.take(needs, now_s)) for local, needs in claims], price)
        self._refill(reservation.local_accounts)
        return reservation

    async def _until_held(self, claims: list[tuple[LocalAccount, Amounts]]) -> float:
        """Return the time once all slices hold enough, usually at once. Raises LimitReached or Unavailable."""
        now_s = self._clock.now_s()
        if all(local.slice.has(needs, now_s) for local, needs in claims):
            return now_s
        await self._wait_for_slices(claims)
        return self._clock.now_s()

    def _refill(self, local_accounts: Iterable[LocalAccount]) -> None:
        for local in local_accounts:
            if local.slice.is_low:
                self._exchange_soon(local)

    def _claims(
        self, accounts: Iterable[tuple[str, str, Limits | None]], amounts: Amounts
    ) -> list[tuple[LocalAccount, Amounts]]:
        """Return the accounts that a request needs amounts of, from (whose, account id, limits).

        Raises LimitReached if the request alone exceeds a limit.
        """
        claims = []
        for whose, account_id, terms in accounts:
            if terms is not None:
                local = self._local_account(account_id, whose, terms)
                claims.append((local, terms.needs(amounts)))
        for local, needs in claims:
            refusal = too_large(local.terms, local.whose, needs)
            if refusal is not None:
                raise LimitReached(refusal, tuple(one for one, _ in claims))
        return claims

    def _local_account(self, account_id: str, whose: str, terms: Limits) -> LocalAccount:
        local = self._local_accounts.get(account_id)
        if local is None:
            local = self._local_accounts[account_id] = LocalAccount(
                account_id, whose, self._gateway_id, terms, self._clock
            )
        local.terms = terms
        self._asked_s[account_id] = time.monotonic()
        return local

    async def _wait_for_slices(self, claims: list[tuple[LocalAccount, Amounts]]) -> None:
        """Wait until all slices hold enough. Raises LimitReached or Unavailable."""
        changed = asyncio.Event()
        try:
            for wait_s in (SLICE_WAIT_S, self._reach_limit_s - SLICE_WAIT_S):
                try:
                    async with asyncio.timeout(wait_s):
                        await self._until_enough(claims, changed)
                        return
                except TimeoutError:
                    self._refuse_late(claims)
                if self._failing:
                    break
        finally:
            for local, _ in claims:
                local.waiting.pop(changed, None)
        raise Unavailable

    async def _until_enough(self, claims: list[tuple[LocalAccount, Amounts]], changed: asyncio.Event) -> None:
        while short := self._short_ones(claims):
            changed.clear()
            for local, needs in short:
                local.waiting[changed] = needs
                self._exchange_soon(local)
            await changed.wait()

    def _short_ones(self, claims: list[tuple[LocalAccount, Amounts]]) -> list[tuple[LocalAccount, Amounts]]:
        """Return the accounts whose slices are too small. Raises LimitReached if no more can be leased."""
        now_s = self._clock.now_s()
        short = [(local, needs) for local, needs in claims if not local.slice.has(needs, now_s)]
        for local, needs in short:
            refusal = local.shortage(needs, now_s)
            if refusal is not None:
                self._note_refusal(local, refusal)
                raise LimitReached(refusal, tuple(one for one, _ in claims))
        return short

    def _refuse_late(self, claims: list[tuple[LocalAccount, Amounts]]) -> None:
        """Raise LimitReached after a timeout if an account was short at its last exchange."""
        now_s = self._clock.now_s()
        for local, needs in claims:
            refusal = None if local.slice.has(needs, now_s) else local.last_known_shortage(needs, now_s)
            if refusal is not None:
                self._note_refusal(local, refusal)
                raise LimitReached(refusal, tuple(one for one, _ in claims))

    def _note_refusal(self, local: LocalAccount, refusal: Refusal) -> None:
        """Note a budget that has too little left even if running requests return their reservations."""
        is_spent = refusal.kind is Kind.MONEY and refusal.retry_after_s is None and not refusal.is_too_large
        if is_spent and local.whose != POOL:
            self._refused_budgets.add(local.account_id)

    async def _tell_refusals(self) -> None:
        """Report refused budgets to the ledger, which sends webhooks to the team."""
        while self._refused_budgets:
            try:
                await self._bus.publish(subjects.BUDGET_REFUSED, self._refused_budgets.pop().encode())
            except BusError as error:  # the next refusal reports it again
                log.debug("cannot report an exhausted budget: %s", error)

    # --- exchanges ----------------------------------------------------------------------------------------------------

    def _exchange_soon(self, local: LocalAccount) -> None:
        self._exchanging.start(local.account_id, lambda: self._exchange_until_served(local))

    async def _exchange_until_served(self, local: LocalAccount) -> None:
        while True:
            gap_s = CLOSED_GAP_S if local.is_closed else EXCHANGE_GAP_S
            await asyncio.sleep(max(0.0, local.exchanged_s + gap_s - time.monotonic()))
            async with self._exchange_slots:
                if not await self._exchange(local):
                    return
            local.wake()
            await asyncio.sleep(0)  # let waiting requests check
            if local.waiting:
                await self._publish_wanted(local)
            elif not local.is_wanted:
                return

    async def _exchange(self, local: LocalAccount) -> bool:
        try:
            await local.exchange(self._account_store)
        except Unseeded:
            self._seed_soon(local)
            return False
        except (BusError, ProtocolError) as error:
            if not self._failing:
                log.warning("cannot exchange limits; requests use what is leased until the lease expires: %s", error)
            self._failing = True
            return False
        self._failing = False
        return True

    def _seed_soon(self, local: LocalAccount) -> None:
        self._seeding.start(local.account_id, lambda: self._seed(local))

    async def _seed(self, local: LocalAccount) -> None:
        """Load the initial amounts of a missing account while requests wait for it."""
        while not await self._is_seeded(local):
            if not local.waiting:
                return
            await asyncio.sleep(SEED_GAP_S)
        self._exchange_soon(local)

    async def _is_seeded(self, local: LocalAccount) -> bool:
        """Return whether the initial amounts of an account are known, after trying to load them."""
        now_s, spent = self._clock.now_s(), 0
        try:
            async with self._seed_slots, asyncio.timeout(SEED_LIMIT_S):
                if local.account is EMPTY:
                    await check_nobody_holds(self._bus, self._started_s)
                if local.terms.limits[Kind.MONEY] is not None:
                    await until_ledger_is_current(self._bus)
                    terms = local.terms.budget_period
                    spent = await self._ledger.spent_nano_usd(local.account_id, local.whose, terms, now_s)
        except (BusError, DatabaseUnavailable, TimeoutError) as error:
            log.warning("cannot load the spend of %s yet: %s", local.account_id, str(error) or "the ledger is too slow")
            return False
        local.seed = Seed(now_s, spent)
        return True

    async def _publish_wanted(self, local: LocalAccount) -> None:
        try:
            await self._bus.publish(subjects.QUOTA_WANTED, f"{self._gateway_id} {local.account_id}".encode())
        except BusError as error:  # waiting requests will be refused
            log.debug("cannot ask other gateways for unused limits: %s", error)

    async def _on_wanted(self, message: Msg) -> None:
        sender, _, account_id = message.data.decode("utf-8", "replace").partition(" ")
        local = self._local_accounts.get(account_id)
        if local is not None and sender != self._gateway_id and any(local.slice.idle):
            local.is_wanted = True
            self._exchange_soon(local)
