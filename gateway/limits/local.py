"""One account's local_accounts at this gateway: the slice, what is known of the account, and who waits."""

import asyncio
import time
from typing import Final

from msgspec import Struct
from msgspec.structs import replace

from db.accounts.principal import Limits, plus
from gateway.limits.account import EMPTY, WINDOW_S, Exchanged, Report, as_of, exchange, free_amounts, merged
from gateway.limits.account_store import AccountStore
from gateway.limits.refusals import RateStatus, Refusal, rate_status, shortage
from gateway.limits.seeds import FRESH_S as SEED_FRESH_S
from gateway.limits.seeds import Seed, Unseeded
from gateway.limits.slices import Slice
from protocol.errors import BusError
from protocol.gateways import Account, Amounts, Kind, Lease
from protocol.nats.clock import ServerClock

MAX_TRIES: Final = 16  # of one exchange, while other gateways change the same account
MAX_NEEDS_REPORTED: Final = 1024  # requests whose needs one exchange looks at
FRESH_S: Final = 0.05  # so long after an exchange, what it has found may refuse requests without another one


class UnconfirmedExchange(Struct, frozen=True):
    """An exchange of which nobody knows whether it was stored."""

    number: int
    report: Report
    given_back: Amounts
    exchanged: Exchanged


class LocalAccount:
    """Only the event loop touches it, and ``exchange`` runs once at a time."""

    def __init__(self, account_id: str, whose: str, gateway_id: str, terms: Limits, clock: ServerClock) -> None:
        self.account_id = account_id
        self.whose = whose  # "key" | "team"
        self.terms = terms
        self.slice = Slice()
        self.account: Account = EMPTY  # as it was after the last exchange
        self.exchanged_s = float("-inf")  # monotonic clock
        self.is_wanted = False  # others miss what we hold without need
        self.waiting: dict[asyncio.Event, Amounts] = {}  # what each needs
        self.seed: Seed | None = None  # for an account that is not there
        self.clock = clock  # of all gateways, so that they agree when a lease is over
        self._gateway_id = gateway_id
        self._number = 0
        self._entry: int | None = None  # sequence of the bucket's entry that is ``account``; None: to be read again
        self._lease: Lease | None = None  # as it was last stored
        self._unconfirmed: UnconfirmedExchange | None = None

    def wake(self) -> None:
        """Let those who wait look again."""
        for event in self.waiting:
            event.set()

    def shortage(self, needs: Amounts, now_s: float) -> Refusal | None:
        """The limit that refuses, by what is known; None: there may be enough, or nothing recent is known."""
        if time.monotonic() - self.exchanged_s > FRESH_S:
            return None
        left = plus(self._idle(), free_amounts(self.account, self.terms.limits))
        for gateway_id, lease in self.account.leases.items():
            if gateway_id != self._gateway_id:
                left = plus(left, lease.idle)  # it may be given back
        return self._shortage(needs, left, now_s)

    def _shortage(self, needs: Amounts, left: Amounts, now_s: float) -> Refusal | None:
        account = self.slice.with_unreported(self.account)
        return shortage(account, self.terms, self.whose, needs, left=left, now_s=now_s)

    def last_known_shortage(self, needs: Amounts, now_s: float) -> Refusal | None:
        """The limit of which there was less than is needed at the last exchange; None: of none, or nobody knows.

        What others hold and do not use does not count: it has not been given back in time.
        """
        if now_s >= self.slice.expires_s:
            return None
        return self._shortage(needs, plus(self._idle(), free_amounts(self.account, self.terms.limits)), now_s)

    def _idle(self) -> Amounts:
        idle = self.slice.idle
        return idle[0], idle[1], idle[2], idle[3]

    def known_account(self) -> Account:
        """The account as it was after the last exchange, with what was spent here since."""
        return self.slice.with_unreported(self.account)

    @property
    def is_idle(self) -> bool:
        """Return whether nothing is held, and nothing is left to report or to find out."""
        return self.slice.is_empty and self._unconfirmed is None

    def would_be_missed(self, now_s: float) -> bool:
        """Return whether a lost account needs this copy: something is held or to be told, or a rate counts still."""
        oldest = int(now_s) - WINDOW_S
        return not self.is_idle or any(at > oldest for seconds in self.account.used for at in seconds)

    def rate_status(self, kind: Kind, now_s: float) -> RateStatus | None:
        """Use of a rate limit."""
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
        raise BusError(f"the quota account {self.account_id} changes all the time")

    async def _read(self, store: AccountStore) -> None:
        before = self.account
        self.account, self._entry = await store.load(self.account_id) or (self._restored(), 0)
        lease, gone = self.account.leases.get(self._gateway_id), self.account.vanished.get(self._gateway_id)
        doubt, self._unconfirmed = self._unconfirmed, None
        if doubt is not None:
            known = lease or gone
            if known is not None and known.exchange == doubt.number:
                self._leased(doubt.exchanged)
            else:  # not stored; or recounted, and then it may count twice, which keeps the limit
                self.slice.undo_report(doubt.report, doubt.given_back)
        ours = self._lease
        if ours is not None and lease is not None and lease.exchange < ours.exchange:
            # It was lost, and another gateway has put its copy there, which is older than ours.
            self.account = merged(self.account, before)
            self.slice.drop_idle()
        elif ours is not None and any(ours.held) and (lease is None or lease.exchange != ours.exchange):
            self.slice.presumed_dead(keeps_money=gone is not None)  # again and again until our next report is stored

    def _restored(self) -> Account:
        """Return the initial state of a missing account. Raises Unseeded."""
        now_s = self.clock.now_s()
        needs_ledger = self.terms.limits[Kind.MONEY] is not None
        if (needs_ledger or self.account is EMPTY) and (self.seed is None or now_s - self.seed.at_s > SEED_FRESH_S):
            raise Unseeded
        account = as_of(self.account, self.terms, now_s, but=self._gateway_id)
        spent = 0 if self.seed is None else self.seed.spent_nano_usd
        return replace(account, spent_nano_usd=max(account.spent_nano_usd, spent))

    async def _write(self, store: AccountStore, *, keep_idle: bool) -> bool:
        """Return whether the account was changed; False: another gateway was quicker."""
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
