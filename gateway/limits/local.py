"""One account at this gateway: its slice, the last known account, and the waiting requests."""

import asyncio
import math
import time
from typing import Final

from msgspec import Struct
from msgspec.structs import replace

from db.accounts.principal import Limits, LimitValues, is_later, period_at, plus
from gateway.errors import RateStatus
from gateway.limits.account import (
    CLOCK_SLACK_S,
    EMPTY,
    LEASE_S,
    WINDOW_S,
    AccountStore,
    Exchanged,
    Report,
    as_of,
    exchange,
    free_amounts,
    is_closed,
    merged,
    used_amounts,
)
from gateway.limits.seeds import FRESH_S as SEED_FRESH_S
from gateway.limits.seeds import Seed, Unseeded
from protocol.errors import BusError
from protocol.gateways import KINDS, NOTHING, RATES, Account, Amounts, Kind, Lease
from protocol.nats.clock import ServerClock

SOON_S = 1.0  # Retry-After if running requests hold the missing amount: their end is unknown


class Refusal(Struct, frozen=True):
    """A refusal by a limit."""

    kind: Kind
    whose: str  # "key" | "team"
    limit: int
    used: int  # including reservations of running requests
    needed: int
    retry_after_s: float | None  # None: only after a change of limit or request, or in the next period

    @property
    def is_too_large(self) -> bool:
        """True if the request alone is more than the limit."""
        return self.needed > self.limit


def too_large(terms: Limits, whose: str, needs: Amounts) -> Refusal | None:
    """Return the limit that the request alone exceeds, if any."""
    for kind in (*RATES, Kind.CONCURRENT):
        limit = terms.limits[kind]
        if limit is not None and needs[kind] > limit:
            return Refusal(kind, whose, limit, 0, needs[kind], None)
    return None


def shortage(
    account: Account, terms: Limits, whose: str, needs: Amounts, *, left: Amounts, now_s: float
) -> Refusal | None:
    """Return the limit of which ``left`` is less than a request needs; None: all suffice."""
    for kind in KINDS:
        limit = terms.limits[kind]
        if limit is not None and needs[kind] and needs[kind] > left[kind]:
            retry_after_s = _retry_after_s(account, terms.limits, kind, needs, now_s)
            return Refusal(kind, whose, limit, max(0, limit - left[kind]), needs[kind], retry_after_s)
    return None


def _retry_after_s(account: Account, limits: LimitValues, kind: Kind, needs: Amounts, now_s: float) -> float | None:
    limit = limits[kind] or 0
    if kind is Kind.MONEY:
        return None if account.spent_nano_usd + needs[kind] > limit else SOON_S
    if kind is Kind.CONCURRENT:
        return SOON_S
    free = limit - used_amounts(account)[kind]
    for second, used in sorted(account.used[kind].items()):
        if free >= needs[kind]:
            break
        free += used
        wait_s = second + WINDOW_S - now_s
        if free >= needs[kind]:
            return max(0.1, wait_s)
    return SOON_S


def rate_status(account: Account, terms: Limits, kind: Kind, gateway_id: str, now_s: float) -> RateStatus | None:
    """Return the known use of a rate; None: it has no limit."""
    limit = terms.limits[kind]
    if limit is None:
        return None
    oldest = int(now_s) - WINDOW_S
    used = {second: amount for second, amount in account.used[kind].items() if second > oldest and amount > 0}
    held = sum(lease.held[kind] for one, lease in account.leases.items() if one != gateway_id)
    newest = max(used, default=oldest)
    return RateStatus(limit, max(0, limit - sum(used.values()) - held), max(0.0, newest + WINDOW_S - now_s))


# --- the slice --------------------------------------------------------------------------------------------------------
#
# The slice of one account that this gateway holds. Requests are admitted from it without any I/O.
#
#     idle ──take──> busy (concurrency, money) ──settle──> idle; the used amount goes into the next report
#          ──take──> used (rates) ─────────────settle──> the unneeded part returns to idle
#
# At all times idle + busy + unreported use equals the amount that the account records as held by this gateway.

# A refunded amount of a rate is reused only if its second stays in the account's window until the refund is reported.
# Later refunds are ignored: the window frees the amount.
REFUNDABLE_S: Final = WINDOW_S - LEASE_S - CLOCK_SLACK_S
AHEAD_S: Final = 0.25  # expected use over this time is leased in advance
SHORT_S: Final = 0.02  # shorter bursts count as if spread over this time
LONG_S: Final = 1.0


class Taken:
    """A request's amounts from one slice. Settle them once."""

    __slots__ = ("amounts", "at_s", "is_concurrent", "period")

    def __init__(self, amounts: Amounts, at_s: int, period: str) -> None:
        self.amounts = amounts
        self.at_s = at_s  # unix second
        self.period = period  # of its money
        self.is_concurrent = True  # counts as a concurrent request


class Slice:
    """One account's slice. Times are in seconds since 1970, for comparison between gateways."""

    def __init__(self) -> None:
        self.expires_s = 0.0
        self.period = ""
        self.is_changed = False  # has amounts to report
        self.idle = [0, 0, 0, 0]
        self._busy = [0, 0, 0, 0]  # of CONCURRENT and MONEY
        self._used: tuple[dict[int, int], dict[int, int]] = ({}, {})  # of RATES, not reported yet
        self._spent = 0  # of MONEY, not reported yet
        self._taken = [0, 0, 0, 0]  # since the last report
        self._reported_s = 0.0  # when that was
        self._usual = NOTHING  # the use expected at that time

    @property
    def is_empty(self) -> bool:
        """True if nothing is held and nothing unreported."""
        return not (self.is_changed or any(self.idle) or any(self._busy))

    @property
    def busy(self) -> Amounts:
        """Return the CONCURRENT and MONEY held by running requests."""
        return (0, 0, self._busy[Kind.CONCURRENT], self._busy[Kind.MONEY])

    @property
    def is_low(self) -> bool:
        """Return whether less than half of the expected use is left."""
        return any(2 * idle < usual for idle, usual in zip(self.idle, self._usual, strict=True))

    def with_unreported(self, account: Account) -> Account:
        """Return the account with the use and spending since the last report added."""
        requests, tokens = (
            {at_s: reported.get(at_s, 0) + mine.get(at_s, 0) for at_s in reported.keys() | mine.keys()}
            for reported, mine in zip(account.used, self._used, strict=True)
        )
        spent = self._spent if account.period == self.period else 0
        return replace(account, used=(requests, tokens), spent_nano_usd=account.spent_nano_usd + spent)

    # --- requests -----------------------------------------------------------------------------------------------------

    def has(self, needs: Amounts, now_s: float) -> bool:
        """Return whether the slice holds enough for a request."""
        return now_s < self.expires_s and all(
            not need or need <= idle for need, idle in zip(needs, self.idle, strict=True)
        )

    def take(self, needs: Amounts, now_s: float) -> Taken:
        """Take a request's amounts, which the slice must have."""
        at_s = int(now_s)
        for kind in KINDS:
            self.idle[kind] -= needs[kind]
            self._taken[kind] += needs[kind]
        for kind in RATES:
            if needs[kind]:
                self._used[kind][at_s] = self._used[kind].get(at_s, 0) + needs[kind]
        self._busy[Kind.CONCURRENT] += needs[Kind.CONCURRENT]
        self._busy[Kind.MONEY] += needs[Kind.MONEY]
        self.is_changed = True
        return Taken(needs, at_s, self.period)

    def release_concurrency(self, taken: Taken) -> None:
        """Stop counting a request as concurrent. Idempotent."""
        if taken.is_concurrent:
            taken.is_concurrent = False
            self._busy[Kind.CONCURRENT] -= taken.amounts[Kind.CONCURRENT]
            self.idle[Kind.CONCURRENT] += taken.amounts[Kind.CONCURRENT]
            self.is_changed = True

    def settle(self, taken: Taken, actual: Amounts, now_s: float) -> None:
        """Settle an ended request with its ``actual`` rates and money, which may exceed the reservation."""
        self.release_concurrency(taken)
        for kind in RATES:
            self._give_back(kind, taken.at_s, taken.amounts[kind] - actual[kind], now_s)
        if taken.period == self.period:
            reserved, spent = taken.amounts[Kind.MONEY], actual[Kind.MONEY]
            self._busy[Kind.MONEY] -= reserved
            self.idle[Kind.MONEY] += reserved - spent
            self._spent += spent
        self.is_changed = True

    def _give_back(self, rate: Kind, at_s: int, amount: int, now_s: float) -> None:
        if amount and now_s - at_s < REFUNDABLE_S:
            self._used[rate][at_s] = self._used[rate].get(at_s, 0) - amount
            self.idle[rate] += amount

    # --- reports ------------------------------------------------------------------------------------------------------

    def begin_report(
        self, terms: Limits, needs: tuple[Amounts, ...], now_s: float, *, keep_idle: bool
    ) -> tuple[Report, Amounts]:
        """Begin a report; return it and the returned idle amounts. ``end_report`` or ``undo_report`` must follow.

        Requests may take and settle amounts in between; the next report includes them.
        """
        self._roll_over(period_at(terms.budget_period, now_s))
        self.idle = [max(0, idle) for idle in self.idle]  # an overdraft is reported as used
        self._usual = self._taken_soon(now_s) if keep_idle else NOTHING
        self._taken, self._reported_s = [0, 0, 0, 0], now_s
        wanted = self._usual
        if keep_idle:  # else return all idle amounts, which other gateways may need
            for one in needs:
                wanted = plus(wanted, one)
        given = tuple(max(0, idle - most) for idle, most in zip(self.idle, wanted, strict=True))
        given_back: Amounts = (given[0], given[1], given[2], given[3])
        self._add_idle(given_back, sign=-1)
        idle = (self.idle[0], self.idle[1], self.idle[2], self.idle[3])
        report = Report(
            used=self._used,
            spent_nano_usd=self._spent,
            period=self.period,
            held=plus(idle, self.busy),
            idle=idle,
            needs=needs,
            ahead=self._usual,
        )
        self._used, self._spent = ({}, {}), 0
        self.is_changed = False
        return report, given_back

    def _taken_soon(self, now_s: float) -> Amounts:
        """Return the expected use in ``AHEAD_S`` at the rate since the last report."""
        share = AHEAD_S / min(LONG_S, max(SHORT_S, now_s - self._reported_s))
        soon = [math.ceil(taken * share) for taken in self._taken]
        return soon[0], soon[1], soon[2], soon[3]

    def end_report(self, exchanged: Exchanged) -> None:
        """Finish a report that was stored."""
        self._roll_over(exchanged.account.period)
        self._add_idle(exchanged.granted)
        self.expires_s = exchanged.expires_unix_ms / 1000

    def undo_report(self, report: Report, given_back: Amounts) -> None:
        """Undo a report that was not stored."""
        for mine, reported in zip(self._used, report.used, strict=True):
            for at_s, used in reported.items():
                mine[at_s] = mine.get(at_s, 0) + used
        if report.period == self.period:
            self._spent += report.spent_nano_usd
            self.idle[Kind.MONEY] += given_back[Kind.MONEY]
        self._add_idle((*given_back[:3], 0))
        self.is_changed = True

    def presumed_dead(self, *, keeps_money: bool) -> None:
        """Handle the expiry of this gateway's lease: other gateways counted what it held as used.

        Requests and tokens count as used until their minute ends. Money was not necessarily spent: the next report
        corrects it, unless a recount did, in which case other gateways may hold the idle amount.
        """
        self.idle = [0, 0, 0, self.idle[Kind.MONEY] if keeps_money else 0]
        self._used = ({}, {})
        self.is_changed = True

    def drop_idle(self) -> None:
        """Forget idle amounts, because the account was recreated."""
        self.idle = [0, 0, 0, 0]
        self.is_changed = True

    def _roll_over(self, period: str) -> None:
        """Begin a new period: amounts held of the previous budget are void, and their requests settle for nothing."""
        if is_later(period, self.period):
            self.period = period
            self.idle[Kind.MONEY] = self._busy[Kind.MONEY] = 0
            self._spent = 0

    def _add_idle(self, amounts: Amounts, sign: int = 1) -> None:
        for kind in KINDS:
            self.idle[kind] += sign * amounts[kind]


# --- the account ------------------------------------------------------------------------------------------------------

MAX_TRIES: Final = 16  # of one exchange, if other gateways change the account meanwhile
MAX_NEEDS_REPORTED: Final = 1024  # waiting requests considered in one exchange
FRESH_S: Final = 0.05  # an exchange's result may refuse requests for this long without a new exchange


class UnconfirmedExchange(Struct, frozen=True):
    """An exchange that may or may not have been stored."""

    number: int
    report: Report
    given_back: Amounts
    exchanged: Exchanged


class LocalAccount:
    """One account at this gateway. Only used in the event loop; only one ``exchange`` runs at a time."""

    def __init__(self, account_id: str, whose: str, gateway_id: str, terms: Limits, clock: ServerClock) -> None:
        self.account_id = account_id
        self.whose = whose  # "key" | "team"
        self.terms = terms
        self.slice = Slice()
        self.account: Account = EMPTY  # as it was after the last exchange
        self.exchanged_s = float("-inf")  # monotonic clock
        self.is_wanted = False  # other gateways need what is idle here
        self.waiting: dict[asyncio.Event, Amounts] = {}  # needs of each waiting request
        self.seed: Seed | None = None  # initial amounts of a missing account
        self.clock = clock  # shared by all gateways, so that they agree when a lease expires
        self._gateway_id = gateway_id
        self._number = 0
        self._entry: int | None = None  # sequence of the bucket's entry with ``account``; None: reread it
        self._lease: Lease | None = None  # as it was last stored
        self._unconfirmed: UnconfirmedExchange | None = None

    def wake(self) -> None:
        """Wake the waiting requests."""
        for event in self.waiting:
            event.set()

    def shortage(self, needs: Amounts, now_s: float) -> Refusal | None:
        """Return the limit that refuses, from a recent exchange; None: there may be enough, or it is unknown."""
        if time.monotonic() - self.exchanged_s > FRESH_S:
            return None
        left = plus(self._idle(), free_amounts(self.account, self.terms.limits))
        for gateway_id, lease in self.account.leases.items():
            if gateway_id != self._gateway_id:
                left = plus(left, lease.idle)  # its holder may return it
        return self._shortage(needs, left, now_s)

    def _shortage(self, needs: Amounts, left: Amounts, now_s: float) -> Refusal | None:
        account = self.slice.with_unreported(self.account)
        return shortage(account, self.terms, self.whose, needs, left=left, now_s=now_s)

    def last_known_shortage(self, needs: Amounts, now_s: float) -> Refusal | None:
        """Return the limit that was short at the last exchange; None: none, or unknown.

        Idle amounts of other gateways do not count: they were not returned in time.
        """
        if now_s >= self.slice.expires_s:
            return None
        return self._shortage(needs, plus(self._idle(), free_amounts(self.account, self.terms.limits)), now_s)

    def _idle(self) -> Amounts:
        idle = self.slice.idle
        return idle[0], idle[1], idle[2], idle[3]

    def known_account(self) -> Account:
        """Return the account as of the last exchange, with the use and spending here since."""
        return self.slice.with_unreported(self.account)

    @property
    def is_idle(self) -> bool:
        """Return whether nothing is held, unreported or unconfirmed."""
        return self.slice.is_empty and self._unconfirmed is None

    @property
    def is_closed(self) -> bool:
        """Return whether no money can be leased yet, because the account was lost."""
        return self.terms.limits[Kind.MONEY] is not None and is_closed(self.account, self.clock.now_s())

    def would_be_missed(self, now_s: float) -> bool:
        """Return whether a lost account needs this copy: it has held, unreported or recently used amounts."""
        oldest = int(now_s) - WINDOW_S
        return not self.is_idle or any(at > oldest for seconds in self.account.used for at in seconds)

    def rate_status(self, kind: Kind, now_s: float) -> RateStatus | None:
        """Return the known use of a rate limit."""
        account = self.slice.with_unreported(self.account)
        return rate_status(account, self.terms, kind, self._gateway_id, now_s)

    async def exchange(self, store: AccountStore, *, keep_idle: bool = True) -> None:
        """Report to the account and lease from it. Raises BusError, ProtocolError or Unseeded."""
        if self.is_wanted:
            self.is_wanted = keep_idle = False
        for _ in range(MAX_TRIES):
            if self._entry is None:
                await self._read(store)
            if await self._write(store, keep_idle=keep_idle):
                return
        raise BusError(f"the quota account {self.account_id} changed at every try")

    async def _read(self, store: AccountStore) -> None:
        before, found = self.account, await store.load(self.account_id)
        self.account, self._entry = found or (self._restored(), 0)
        lease, gone = self.account.leases.get(self._gateway_id), self.account.vanished.get(self._gateway_id)
        doubt, self._unconfirmed = self._unconfirmed, None
        if doubt is not None:
            known = lease or gone
            if known is not None and known.exchange == doubt.number:
                self._leased(doubt.exchanged)
            else:  # not stored, or recounted: then it may count twice, which is safe
                self.slice.undo_report(doubt.report, doubt.given_back)
        ours = self._lease
        if ours is not None and found is not None and self.account.restored_unix_ms != before.restored_unix_ms:
            self.account = merged(self.account, before, self._gateway_id)  # another gateway's copy may be older
            self.slice.drop_idle()
        elif ours is not None and any(ours.held) and (lease is None or lease.exchange != ours.exchange):
            self.slice.presumed_dead(keeps_money=gone is not None)  # until our next report is stored

    def _restored(self) -> Account:
        """Return the initial account in place of a missing one. Raises Unseeded."""
        now_s = self.clock.now_s()
        needs_ledger = self.terms.limits[Kind.MONEY] is not None
        if (needs_ledger or self.account is EMPTY) and (self.seed is None or now_s - self.seed.at_s > SEED_FRESH_S):
            raise Unseeded
        account = as_of(self.account, self.terms, now_s, but=self._gateway_id)
        spent = 0 if self.seed is None else self.seed.spent_nano_usd
        restored_unix_ms = 0 if self.account is EMPTY else int(now_s * 1000)
        return replace(account, spent_nano_usd=max(account.spent_nano_usd, spent), restored_unix_ms=restored_unix_ms)

    async def _write(self, store: AccountStore, *, keep_idle: bool) -> bool:
        """Return whether the account was stored; False: another gateway changed it first."""
        now_s = self.clock.now_s()
        needs = tuple(list(self.waiting.values())[:MAX_NEEDS_REPORTED])
        self._number += 1
        report, given_back = self.slice.begin_report(self.terms, needs, now_s, keep_idle=keep_idle)
        exchanged = exchange(self.account, self._gateway_id, report, self.terms, number=self._number, now_s=now_s)
        over, self._entry = self._entry or 0, None
        self._unconfirmed = UnconfirmedExchange(self._number, report, given_back, exchanged)
        entry = await store.store(self.account_id, exchanged.account, over)
        self._unconfirmed = None
        if entry is None:
            self.slice.undo_report(report, given_back)
            return False
        self._entry = entry
        self.account = exchanged.account
        self.exchanged_s = time.monotonic()
        self._leased(exchanged)
        return True

    def _leased(self, exchanged: Exchanged) -> None:
        self.slice.end_report(exchanged)
        self._lease = exchanged.account.leases[self._gateway_id]
