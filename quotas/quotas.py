"""Limits of keys and teams as this gateway keeps them: a request reserves from memory, the rest happens beside it.

Only a request whose slice does not hold enough waits, for one exchange with the bucket, at most ``SLICE_WAIT_S``.
"""

import asyncio
import logging
import time
from collections.abc import Iterable, Sequence
from functools import reduce
from typing import Final

from nats.aio.msg import Msg

from accounts.principal import Principal
from db.errors import DatabaseUnavailable
from ledger.prices import TokenPrice
from protocol import subjects
from protocol.bus import Bus
from protocol.errors import BusError, ProtocolError
from protocol.quotas import Amounts, Kind
from quotas.account import EMPTY, LEASE_S
from quotas.account_store import AccountStore
from quotas.limits import Limits, limits_of, minus, plus
from quotas.local_account import LocalAccount
from quotas.pools import POOL
from quotas.refusals import Refusal, too_large
from quotas.reservation import Estimate, Reservation
from quotas.seeds import Ledger, Seed, Unseeded, check_nobody_holds, until_ledger_is_current
from quotas.usage import LimitUsage, taken_amounts, uses

SLICE_WAIT_S: Final = 0.1  # how long a request waits for a larger slice
REACH_WAIT_S: Final = 1.0  # how long for any at all: the queue server, or this process, may be busy
EXCHANGE_GAP_S: Final = 0.02  # between two exchanges of one account
REPORT_PERIOD_S: Final = 1.0  # how old what others know of our use may be; a part of LEASE_S
RENEW_S: Final = LEASE_S / 3
TICK_S: Final = 0.25
KEEP_PERIOD_S: Final = 10.0  # how old what is known of a kept account may be while nobody asks for it here
FORGET_S: Final = 120.0  # books that nobody has asked for and that hold nothing
MAX_SEEDS: Final = 4  # accounts that the ledger is asked about at once
SEED_LIMIT_S: Final = 5.0
MAX_EXCHANGES: Final = 32  # at once, over all accounts
CLOSE_LIMIT_S: Final = 2.0  # for giving everything back

log = logging.getLogger(__name__)


class Refused(Exception):
    """A limit refuses the request."""

    def __init__(self, refusal: Refusal, books: tuple[LocalAccount, ...]) -> None:
        super().__init__(refusal)
        self.refusal = refusal
        self.books = books


class Unavailable(Exception):
    """What is left of a limit cannot be asked at the moment: the queue server is away."""


class Quotas:
    """Reserves, and reports what was used. ``start`` it, run ``run`` as a supervised task, ``close`` it at the end."""

    def __init__(self, bus: Bus, gateway_id: str, ledger: Ledger) -> None:
        """``ledger``: asked for what was spent where an account is not there."""
        self._bus = bus
        self._ledger = ledger
        self._started_s = 0.0  # by the queue server's clock
        self._seeding: dict[str, asyncio.Task[None]] = {}
        self._seed_places = asyncio.Semaphore(MAX_SEEDS)
        self._clock = bus.clock
        self._gateway_id = gateway_id
        self._account_store = AccountStore(bus)
        self._books: dict[str, LocalAccount] = {}
        self._asked_s: dict[str, float] = {}  # by account, when a request last needed it (monotonic clock)
        self._exchanging: dict[str, asyncio.Task[None]] = {}
        self._places = asyncio.Semaphore(MAX_EXCHANGES)
        self._kept: set[str] = set()  # accounts
        self._failing = False

    async def start(self) -> None:
        """Learn the time, and listen to what others miss. Raises BusError."""
        await self._clock.measure()
        self._started_s = self._clock.now_s()
        self._bus.on_reconnect(self._on_reconnected)
        await self._bus.subscribe(subjects.QUOTA_WANTED, self._on_wanted)

    async def run(self) -> None:
        """Report what was used, renew leases, give back what is not needed; never returns."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._clock.run(), name="server clock")
            await self._run()

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            now_s = time.monotonic()
            for book in list(self._books.values()):
                if book.slice.is_empty and book.account_id not in self._kept:
                    self._forget_if_old(book, now_s)
                elif book.slice.is_empty:
                    if now_s - book.exchanged_s >= KEEP_PERIOD_S:
                        self._exchange_soon(book)
                elif now_s - book.exchanged_s >= (REPORT_PERIOD_S if book.slice.is_changed else RENEW_S):
                    self._exchange_soon(book)

    def _forget_if_old(self, book: LocalAccount, now_s: float) -> None:
        account_id = book.account_id
        if now_s - self._asked_s[account_id] > FORGET_S and account_id not in self._exchanging:
            del self._books[account_id], self._asked_s[account_id]

    def keep(self, whose: str, account_id: str, terms: Limits) -> None:
        """Know an account from now on, and what is used of it, also while nobody asks for it here."""
        self._kept.add(account_id)
        self._book(account_id, whose, terms)

    def kept_uses(self) -> dict[str, tuple[LimitUsage, ...]]:
        """How much is used of the accounts that are kept, as far as this gateway has heard; by their ids."""
        now_s, books = self._clock.now_s(), [self._books[account_id] for account_id in sorted(self._kept)]
        return {
            book.account_id: uses(book.terms, taken_amounts(book.known_account(), book.terms, now_s), now_s)
            for book in books
            if book.exchanged_s > float("-inf")
        }

    async def _on_reconnected(self) -> None:
        # The bucket may have been lost: what we know of it is to be there again before others begin without.
        for book in self._books.values():
            if not book.slice.is_empty:
                self._exchange_soon(book)

    async def close(self) -> None:
        """Report everything and give back what is idle, within ``CLOSE_LIMIT_S``; what is not ends with its lease."""
        try:
            async with asyncio.timeout(CLOSE_LIMIT_S):
                await asyncio.gather(*self._exchanging.values(), return_exceptions=True)
                for book in self._books.values():
                    if not book.slice.is_empty:
                        await book.exchange(self._account_store, keep_idle=False)
        except (TimeoutError, BusError, ProtocolError, Unseeded) as error:
            log.warning("limits are not given back; they return when their leases end: %s", error or "too slow")
        finally:
            for task in (*self._exchanging.values(), *self._seeding.values()):
                task.cancel()

    # --- requests -----------------------------------------------------------------------------------------------------

    async def reserve(
        self, principal: Principal, estimates: Sequence[Estimate], held: Reservation | None = None
    ) -> list[Reservation] | None:
        """Reserve the most that requests can use, of the key's and the team's limits; None: it has none.

        ``held``: what the first of them has reserved already; it gets the rest. There is room for all of them, or
        nothing more is reserved: raises Refused or Unavailable.
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
        books = [book for book, _ in claims]
        reservations = [] if held is None else [held]
        for one, estimate in zip(amounts, estimates, strict=True):
            taken = [(book, book.slice.take(book.terms.needs(one), now_s)) for book in books]
            if held is not None:
                held.enlarge(one, taken, estimate.price)
                held = None
            else:
                reservations.append(Reservation(one, taken, estimate.price))
        self._refill(books)
        return reservations

    async def reserve_money(
        self, accounts: Iterable[tuple[str, Limits]], nano_usd: int, price: TokenPrice | None
    ) -> Reservation:
        """Reserve what a request may cost us at a pool, of each of the pool's accounts. Raises Refused or Unavailable.

        Without accounts there is no cap, and the reservation is of nothing.
        """
        amounts = (0, 0, 0, nano_usd)
        claims = self._claims([(POOL, account_id, terms) for account_id, terms in accounts], amounts)
        now_s = await self._until_held(claims)
        reservation = Reservation(amounts, [(book, book.slice.take(needs, now_s)) for book, needs in claims], price)
        self._refill(reservation.books)
        return reservation

    async def _until_held(self, claims: list[tuple[LocalAccount, Amounts]]) -> float:
        """Return the time when all slices hold enough at once, usually now. Raises Refused or Unavailable."""
        now_s = self._clock.now_s()
        if all(book.slice.has(needs, now_s) for book, needs in claims):
            return now_s
        await self._wait_for_slices(claims)
        return self._clock.now_s()

    def _refill(self, books: Iterable[LocalAccount]) -> None:
        for book in books:
            if book.slice.is_low:
                self._exchange_soon(book)

    def _claims(
        self, accounts: Iterable[tuple[str, str, Limits | None]], amounts: Amounts
    ) -> list[tuple[LocalAccount, Amounts]]:
        """The books that a request needs something of, of (whose, account, limits).

        Raises Refused for what is more than a limit by itself.
        """
        claims = []
        for whose, account_id, terms in accounts:
            if terms is not None:
                book = self._book(account_id, whose, terms)
                claims.append((book, terms.needs(amounts)))
        for book, needs in claims:
            refusal = too_large(book.terms, book.whose, needs)
            if refusal is not None:
                raise Refused(refusal, tuple(one for one, _ in claims))
        return claims

    def _book(self, account_id: str, whose: str, terms: Limits) -> LocalAccount:
        book = self._books.get(account_id)
        if book is None:
            book = self._books[account_id] = LocalAccount(account_id, whose, self._gateway_id, terms, self._clock)
        book.terms = terms
        self._asked_s[account_id] = time.monotonic()
        return book

    async def _wait_for_slices(self, claims: list[tuple[LocalAccount, Amounts]]) -> None:
        """Return when all slices hold enough at once. Raises Refused or Unavailable."""
        changed = asyncio.Event()
        try:
            for wait_s in (SLICE_WAIT_S, REACH_WAIT_S - SLICE_WAIT_S):
                try:
                    async with asyncio.timeout(wait_s):
                        await self._until_enough(claims, changed)
                        return
                except TimeoutError:
                    self._refuse_late(claims)
                if self._failing:
                    break
        finally:
            for book, _ in claims:
                book.waiting.pop(changed, None)
        raise Unavailable

    async def _until_enough(self, claims: list[tuple[LocalAccount, Amounts]], changed: asyncio.Event) -> None:
        while short := self._short_ones(claims):
            changed.clear()
            for book, needs in short:
                book.waiting[changed] = needs
                self._exchange_soon(book)
            await changed.wait()

    def _short_ones(self, claims: list[tuple[LocalAccount, Amounts]]) -> list[tuple[LocalAccount, Amounts]]:
        """Those whose slices do not hold enough. Raises Refused where an account has nothing more."""
        now_s = self._clock.now_s()
        short = [(book, needs) for book, needs in claims if not book.slice.has(needs, now_s)]
        for book, needs in short:
            refusal = book.shortage(needs, now_s)
            if refusal is not None:
                raise Refused(refusal, tuple(one for one, _ in claims))
        return short

    def _refuse_late(self, claims: list[tuple[LocalAccount, Amounts]]) -> None:
        """Nothing came in time. Raises Refused, where it is known that something is missing still."""
        now_s = self._clock.now_s()
        for book, needs in claims:
            refusal = None if book.slice.has(needs, now_s) else book.last_known_shortage(needs, now_s)
            if refusal is not None:
                raise Refused(refusal, tuple(one for one, _ in claims))

    # --- exchanges ----------------------------------------------------------------------------------------------------

    def _exchange_soon(self, book: LocalAccount) -> None:
        if book.account_id not in self._exchanging:
            task = asyncio.create_task(self._exchange_until_served(book))
            self._exchanging[book.account_id] = task
            task.add_done_callback(lambda _: self._exchanging.pop(book.account_id, None))

    async def _exchange_until_served(self, book: LocalAccount) -> None:
        while True:
            await asyncio.sleep(max(0.0, book.exchanged_s + EXCHANGE_GAP_S - time.monotonic()))
            async with self._places:
                if not await self._exchange(book):
                    return
            book.wake()
            await asyncio.sleep(0)  # they look
            if book.waiting:
                await self._tell_wanted(book)
            elif not book.is_wanted:
                return

    async def _exchange(self, book: LocalAccount) -> bool:
        try:
            await book.exchange(self._account_store)
        except Unseeded:
            self._seed_soon(book)
            return False
        except (BusError, ProtocolError) as error:
            if not self._failing:
                log.warning("limits cannot be shared; what is leased serves until its lease ends: %s", error)
            self._failing = True
            return False
        self._failing = False
        return True

    def _seed_soon(self, book: LocalAccount) -> None:
        if book.account_id not in self._seeding:
            task = asyncio.create_task(self._seed(book))
            self._seeding[book.account_id] = task
            task.add_done_callback(lambda _: self._seeding.pop(book.account_id, None))

    async def _seed(self, book: LocalAccount) -> None:
        """Find out what an account that is not there must begin with. It keeps nobody else waiting."""
        now_s, spent = self._clock.now_s(), 0
        try:
            async with self._seed_places, asyncio.timeout(SEED_LIMIT_S):
                if book.account is EMPTY:
                    await check_nobody_holds(self._bus, self._started_s)
                if book.terms.limits[Kind.MONEY] is not None:
                    await until_ledger_is_current(self._bus)
                    terms = book.terms.budget_period
                    spent = await self._ledger.spent_nano_usd(book.account_id, book.whose, terms, now_s)
        except (BusError, DatabaseUnavailable, TimeoutError) as error:
            log.warning("limits of %s are not known yet: %s", book.account_id, error or "the ledger is too slow")
            return
        book.seed = Seed(now_s, spent)
        self._exchange_soon(book)

    async def _tell_wanted(self, book: LocalAccount) -> None:
        try:
            await self._bus.publish(subjects.QUOTA_WANTED, f"{self._gateway_id} {book.account_id}".encode())
        except BusError as error:  # who waits is refused soon
            log.debug("that a limit is wanted could not be told: %s", error)

    async def _on_wanted(self, message: Msg) -> None:
        sender, _, account_id = message.data.decode("utf-8", "replace").partition(" ")
        book = self._books.get(account_id)
        if book is not None and sender != self._gateway_id and any(book.slice.idle) and not book.waiting:
            book.is_wanted = True
            self._exchange_soon(book)
