"""The slice of one account that this gateway holds: requests are admitted from it by memory alone. No I/O here.

    idle ──take──> busy (concurrency, money) ──settle──> idle, and what was used is told with the next report
         ──take──> used (rates) ─────────────settle──> the part that was not needed, back to idle

At every moment idle + busy + what is not reported yet is what the account has down as held by us.
"""

import math
from typing import Final

from msgspec.structs import replace

from db.accounts.principal import Limits, is_later, period_at, plus
from gateway.limits.account import CLOCK_SLACK_S, LEASE_S, WINDOW_S, Exchanged, Report
from protocol.gateways import KINDS, NOTHING, RATES, Account, Amounts, Kind

# An amount of a rate that comes back is used again only where its second stays in the account's window until this has
# been reported: later, the window gives it back by itself.
REFUNDABLE_S: Final = WINDOW_S - LEASE_S - CLOCK_SLACK_S
AHEAD_S: Final = 0.25  # requests of so long are foreseen
SHORT_S: Final = 0.02  # a burst within less is taken for a rate over so long
LONG_S: Final = 1.0


class Taken:
    """A request's amounts from one slice. To be settled once."""

    __slots__ = ("amounts", "at_s", "holds_place", "period")

    def __init__(self, amounts: Amounts, at_s: int, period: str) -> None:
        self.amounts = amounts
        self.at_s = at_s  # unix second
        self.period = period  # of its money
        self.holds_place = True  # counts as concurrent


class Slice:
    """One account's slice. Times are seconds since 1970: they are compared with other gateways'."""

    def __init__(self) -> None:
        self.expires_s = 0.0
        self.period = ""
        self.is_changed = False  # there is something to report
        self.idle = [0, 0, 0, 0]
        self._busy = [0, 0, 0, 0]  # of CONCURRENT and MONEY
        self._used: tuple[dict[int, int], dict[int, int]] = ({}, {})  # of RATES, not reported yet
        self._spent = 0  # of MONEY, not reported yet
        self._taken = [0, 0, 0, 0]  # since the last report
        self._reported_s = 0.0  # when that was
        self._usual = NOTHING  # what was expected then to be taken soon

    @property
    def is_empty(self) -> bool:
        """True if nothing is held and nothing is left to report."""
        return not (self.is_changed or any(self.idle) or any(self._busy))

    @property
    def busy(self) -> Amounts:
        """Return what running requests hold of CONCURRENT and MONEY."""
        return (0, 0, self._busy[Kind.CONCURRENT], self._busy[Kind.MONEY])

    @property
    def is_low(self) -> bool:
        """Return whether less than half of what will soon be needed is left."""
        return any(2 * idle < usual for idle, usual in zip(self.idle, self._usual, strict=True))

    def with_unreported(self, account: Account) -> Account:
        """The account with what was used and spent since the last report."""
        requests, tokens = (
            {at_s: reported.get(at_s, 0) + mine.get(at_s, 0) for at_s in reported.keys() | mine.keys()}
            for reported, mine in zip(account.used, self._used, strict=True)
        )
        spent = self._spent if account.period == self.period else 0
        return replace(account, used=(requests, tokens), spent_nano_usd=account.spent_nano_usd + spent)

    # --- requests -----------------------------------------------------------------------------------------------------

    def has(self, needs: Amounts, now_s: float) -> bool:
        """Return whether a request could be admitted now."""
        return now_s < self.expires_s and all(
            not need or need <= idle for need, idle in zip(needs, self.idle, strict=True)
        )

    def take(self, needs: Amounts, now_s: float) -> Taken:
        """Admit a request that the slice ``has`` enough for."""
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

    def release_place(self, taken: Taken) -> None:
        """A request is no longer running. May be called again."""
        if taken.holds_place:
            taken.holds_place = False
            self._busy[Kind.CONCURRENT] -= taken.amounts[Kind.CONCURRENT]
            self.idle[Kind.CONCURRENT] += taken.amounts[Kind.CONCURRENT]
            self.is_changed = True

    def settle(self, taken: Taken, actual: Amounts, now_s: float) -> None:
        """A request has ended, having used ``actual`` of rates and money (more than was reserved also counts)."""
        self.release_place(taken)
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
        """Begin a report; return it with the idle part given back. ``end_report`` or ``undo_report`` must follow.

        Requests may go on taking and settling in between: it is told with the next one.
        """
        self._roll_over(period_at(terms.budget_period, now_s))
        self.idle = [max(0, idle) for idle in self.idle]  # an overdraft is told as used, and that is that
        self._usual = self._taken_soon(now_s) if keep_idle else NOTHING
        self._taken, self._reported_s = [0, 0, 0, 0], now_s
        wanted = self._usual
        if keep_idle:  # or else what is idle here may be just what others lack, as theirs is what is lacking here
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
        """Return what requests will take in ``AHEAD_S`` at the rate since the last report."""
        share = AHEAD_S / min(LONG_S, max(SHORT_S, now_s - self._reported_s))
        soon = [math.ceil(taken * share) for taken in self._taken]
        return soon[0], soon[1], soon[2], soon[3]

    def end_report(self, exchanged: Exchanged) -> None:
        """The account has taken it."""
        self._roll_over(exchanged.account.period)
        self._add_idle(exchanged.granted)
        self.expires_s = exchanged.expires_unix_ms / 1000

    def undo_report(self, report: Report, given_back: Amounts) -> None:
        """The account has not taken it."""
        for mine, reported in zip(self._used, report.used, strict=True):
            for at_s, used in reported.items():
                mine[at_s] = mine.get(at_s, 0) + used
        if report.period == self.period:
            self._spent += report.spent_nano_usd
            self.idle[Kind.MONEY] += given_back[Kind.MONEY]
        self._add_idle((*given_back[:3], 0))
        self.is_changed = True

    def presumed_dead(self, *, keeps_money: bool) -> None:
        """Our lease ran out and the others have counted what we held as used.

        The rates are lost for their minute, and what we used since is among them. Money was not spent for all that: our
        next report takes the presumption back, unless a recount has, and then what was idle may be somebody else's.
        """
        self.idle = [0, 0, 0, self.idle[Kind.MONEY] if keeps_money else 0]
        self._used = ({}, {})
        self.is_changed = True

    def drop_idle(self) -> None:
        """Forget what is held without need: the account was created again."""
        self.idle = [0, 0, 0, 0]
        self.is_changed = True

    def _roll_over(self, period: str) -> None:
        """Begin a new period: what was held of the budget before is nothing, and its requests settle for nothing."""
        if is_later(period, self.period):
            self.period = period
            self.idle[Kind.MONEY] = self._busy[Kind.MONEY] = 0
            self._spent = 0

    def _add_idle(self, amounts: Amounts, sign: int = 1) -> None:
        for kind in KINDS:
            self.idle[kind] += sign * amounts[kind]
