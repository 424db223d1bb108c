"""The shared account of one key's or team's limits, and the one way in which a gateway changes it, without I/O.

For each kind, at all times:   used + held by all gateways <= limit.   "Used" is the amount admitted in the last
``WINDOW_S`` for a rate, the amount spent in the period for money, and 0 for concurrency. Amounts held by a vanished
gateway count as used, because they may have been.
"""

import base64
from collections.abc import Mapping
from datetime import datetime
from typing import Final

from msgspec import Struct
from msgspec.structs import replace

from db.accounts.principal import Limits, LimitValues, is_later, period_at, plus
from gateway.settings import REACH_LIMIT_S
from protocol import subjects
from protocol.errors import BusError
from protocol.gateways import KINDS, NOTHING, RATES, Account, Amounts, ExpiredLease, Kind, Lease, decode_account, encode
from protocol.job import PROTOCOL_VERSION
from protocol.nats.bus import Bus

# A rate's amounts are kept per whole second: one admitted at second 0.9 counts until 61.0, so that no 60 s exceed the
# limit. This costs at most 1/61 of the limit.
WINDOW_S: Final = 61
LEASE_S: Final = 5.0
# Allowed difference between two gateways' clocks: for other gateways a lease ends this much later than for its holder.
CLOCK_SLACK_S: Final = 1.0
# One gateway may lease 1/AHEAD_SHARE of the free amount ahead of its requests; the rest is for other gateways.
AHEAD_SHARE: Final = 16

EMPTY: Final = Account(v=PROTOCOL_VERSION)


class Report(Struct, frozen=True):
    """A gateway's report of its slice, and its request for more."""

    used: tuple[dict[int, int], dict[int, int]]  # of RATES, since its last report; negative for refunds
    spent_nano_usd: int  # in ``period``, since its last report
    period: str  # of the amounts of money
    held: Amounts
    idle: Amounts
    needs: tuple[Amounts, ...] = ()  # of each waiting request, in order
    ahead: Amounts = NOTHING  # expected to be needed soon


class Exchanged(Struct, frozen=True):
    """Result of a report."""

    account: Account
    granted: Amounts
    expires_unix_ms: int


def exchange(
    account: Account, gateway_id: str, report: Report, terms: Limits, *, number: int, now_s: float
) -> Exchanged:
    """Apply a report to the account and lease amounts; ``number`` identifies this exchange of the gateway.

    ``now_s``: seconds since 1970.
    """
    account = as_of(account, terms, now_s, but=gateway_id)
    before = account.leases.get(gateway_id) or account.vanished.get(gateway_id)
    account = _with_report(_without_presumption(account, gateway_id), report, now_s)
    reported = 0 if before is None else before.spent_nano_usd
    if report.period == account.period:
        reported += report.spent_nano_usd
    held = report.held if report.period == account.period else (*report.held[:3], 0)
    idle = report.idle if report.period == account.period else (*report.idle[:3], 0)
    others = {one: lease for one, lease in account.leases.items() if one != gateway_id}
    free = free_amounts(replace(account, leases=others), terms.limits, held)
    if is_closed(account, now_s):
        free = (*free[:3], 0)
    granted = _granted(free, idle, report, terms.limits)
    expires_unix_ms = int((now_s + LEASE_S) * 1000)
    lease = Lease(number, expires_unix_ms, plus(held, granted), plus(idle, granted), reported)
    return Exchanged(replace(account, leases={**others, gateway_id: lease}), granted, expires_unix_ms)


def is_closed(account: Account, now_s: float) -> bool:
    """Return whether no money may be leased: other gateways may hold leases that a restored copy lacks.

    Each reports them within seconds. Rates and concurrency stay open: what is exceeded there is over within a minute.
    If the queue server's clock is set back, the account opens.
    """
    return abs(now_s - account.restored_unix_ms / 1000) < LEASE_S + CLOCK_SLACK_S


def as_of(account: Account, terms: Limits, now_s: float, *, but: str = "") -> Account:
    """Return the account as of now, with expired leases ended; the lease of gateway ``but`` does not expire."""
    return _without_the_past(_without_the_vanished(account, but, now_s), terms, now_s)


def recounted(
    account: Account, terms: Limits, ledger_nano_usd: int, by_vanished: Mapping[str, int], now_s: float
) -> Account:
    """Return the account with the ledger's spending in this period in place of presumed spending.

    Amounts that live gateways reported may not have reached the ledger yet, so they always count. ``by_vanished``:
    nano-USD that each vanished gateway's requests cost, including reported ones; no vanished gateway may be missing.
    """
    account = _without_the_past(account, terms, now_s)
    reported = account.spent_nano_usd - account.presumed_nano_usd
    for gateway_id, gone in account.vanished.items():
        reported += max(0, by_vanished.get(gateway_id, 0) - gone.spent_nano_usd)
    return replace(account, spent_nano_usd=max(reported, ledger_nano_usd), presumed_nano_usd=0, vanished={})


def merged(account: Account, known: Account, gateway_id: str) -> Account:
    """Return a restored account, raised to the use and spending that a gateway knows: its copy is newer.

    The account is restored from an older copy, but may include what other gateways have reported since.
    """
    used = tuple(
        {at: max(seconds.get(at, 0), more.get(at, 0)) for at in seconds.keys() | more.keys()}
        for seconds, more in zip(account.used, known.used, strict=True)
    )
    account = replace(account, used=used)
    if known.period != account.period:
        return account
    before = known.leases | known.vanished
    spent = known.spent_nano_usd - known.presumed_nano_usd
    for one, lease in account.leases.items():
        if one != gateway_id:
            spent += max(0, lease.spent_nano_usd - (before[one].spent_nano_usd if one in before else 0))
    leases = account.leases | {gateway_id: known.leases[gateway_id]} if gateway_id in known.leases else account.leases
    return replace(account, leases=leases, spent_nano_usd=max(account.spent_nano_usd, spent))


def used_amounts(account: Account) -> Amounts:
    """Return the used amounts reported to the account."""
    requests, tokens = (sum(seconds.values()) for seconds in account.used)
    return requests, tokens, 0, account.spent_nano_usd


def free_amounts(account: Account, limits: LimitValues, held_besides: Amounts = NOTHING) -> Amounts:
    """Return the amounts that are neither used nor held; 0 for kinds without a limit."""
    used = used_amounts(account)
    held = [held_besides, *(lease.held for lease in account.leases.values())]

    def free_of(kind: Kind) -> int:
        limit = limits[kind]
        return 0 if limit is None else max(0, limit - used[kind] - sum(one[kind] for one in held))

    return free_of(Kind.REQUESTS), free_of(Kind.TOKENS), free_of(Kind.CONCURRENT), free_of(Kind.MONEY)


def _granted(free: Amounts, idle: Amounts, report: Report, limits: LimitValues) -> Amounts:
    """Grant the waiting requests, in order, as far as the free amounts suffice; then some amounts in advance."""
    covered = [0, 0, 0, 0]
    for needs in report.needs:
        if all(covered[kind] + needs[kind] <= idle[kind] + free[kind] for kind in KINDS if needs[kind]):
            for kind in KINDS:
                covered[kind] += needs[kind]

    def granted_of(kind: Kind) -> int:
        if limits[kind] is None:
            return 0
        needed = max(0, covered[kind] - idle[kind])
        wish = report.ahead[kind] - (idle[kind] + needed - covered[kind])
        return needed + max(0, min(wish, (free[kind] - needed) // AHEAD_SHARE))

    return (
        granted_of(Kind.REQUESTS),
        granted_of(Kind.TOKENS),
        granted_of(Kind.CONCURRENT),
        granted_of(Kind.MONEY),
    )


def _without_the_vanished(account: Account, gateway_id: str, now_s: float) -> Account:
    """End expired leases: their rates and money count as used, their concurrency is freed."""
    over_ms = (now_s - CLOCK_SLACK_S) * 1000
    over = {one for one, lease in account.leases.items() if one != gateway_id and lease.expires_unix_ms < over_ms}
    if not over:
        return account
    used = tuple(dict(seconds) for seconds in account.used)
    presumed, vanished = 0, dict(account.vanished)
    for one in over:
        lease = account.leases[one]
        for kind in RATES:
            if lease.held[kind] > 0:
                second = lease.expires_unix_ms // 1000
                used[kind][second] = used[kind].get(second, 0) + lease.held[kind]
        if held := lease.held[Kind.MONEY]:
            presumed += held
            vanished[one] = ExpiredLease(lease.exchange, lease.spent_nano_usd, held)
    return replace(
        account,
        used=used,
        spent_nano_usd=account.spent_nano_usd + presumed,
        presumed_nano_usd=account.presumed_nano_usd + presumed,
        leases={one: lease for one, lease in account.leases.items() if one not in over},
        vanished=vanished,
    )


def _without_presumption(account: Account, gateway_id: str) -> Account:
    """Undo the presumption that a gateway spent what it held: it is back, and reports its spending."""
    gone = account.vanished.get(gateway_id)
    if gone is None:
        return account
    return replace(
        account,
        spent_nano_usd=account.spent_nano_usd - gone.held_nano_usd,
        presumed_nano_usd=account.presumed_nano_usd - gone.held_nano_usd,
        vanished={one: gone for one, gone in account.vanished.items() if one != gateway_id},
    )


def _without_the_past(account: Account, terms: Limits, now_s: float) -> Account:
    oldest = int(now_s) - WINDOW_S
    requests, tokens = ({at: used for at, used in seconds.items() if at > oldest} for seconds in account.used)
    account = replace(account, used=(requests, tokens))
    period = period_at(terms.budget_period, now_s)
    if not is_later(period, account.period):
        return account
    leases = {
        one: Lease(lease.exchange, lease.expires_unix_ms, (*lease.held[:3], 0), (*lease.idle[:3], 0))
        for one, lease in account.leases.items()
    }
    return replace(account, period=period, spent_nano_usd=0, presumed_nano_usd=0, leases=leases, vanished={})


def _with_report(account: Account, report: Report, now_s: float) -> Account:
    oldest = int(now_s) - WINDOW_S
    requests, tokens = (_added(seconds, more, oldest) for seconds, more in zip(account.used, report.used, strict=True))
    account = replace(account, used=(requests, tokens))
    if report.period != account.period:
        return account
    return replace(account, spent_nano_usd=account.spent_nano_usd + report.spent_nano_usd)


def _added(seconds: dict[int, int], fields: dict[int, int], oldest: int) -> dict[int, int]:
    """Return the sums, without seconds outside the window and zero amounts."""
    whole = {at: seconds.get(at, 0) + fields.get(at, 0) for at in seconds.keys() | fields.keys()}
    return {at: used for at, used in whole.items() if at > oldest and used > 0}


# --- the bucket -------------------------------------------------------------------------------------------------------
#
# The bucket of accounts: each is replaced only by compare-and-set.

STREAM: Final = f"KV_{subjects.QUOTAS_BUCKET}"


async def created_s(bus: Bus) -> float:
    """Return when the bucket was created, by the queue server's clock, to detect its loss. Raises BusError."""
    info = await bus.api(f"STREAM.INFO.{STREAM}")
    try:
        return datetime.fromisoformat(info["created"]).timestamp()
    except (KeyError, ValueError) as error:
        raise BusError("the queue server did not report when the quota bucket was created") from error


class AccountStore:
    """One gateway's access to the bucket."""

    def __init__(self, bus: Bus, call_limit_s: float = REACH_LIMIT_S) -> None:
        self._bus = bus
        self._call_limit_s = call_limit_s

    async def load(self, account_id: str) -> tuple[Account, int] | None:
        """Return an account and the sequence of its entry, or None. Raises BusError or ProtocolError."""
        found = await self._bus.get_message(STREAM, last_by_subj=self._subject(account_id))
        if found is None:
            return None
        return decode_account(base64.b64decode(found["data"])), int(found["seq"])

    async def store(self, account_id: str, account: Account, over: int) -> int | None:
        """Replace the entry with sequence ``over`` (0: no entry); return the new sequence.

        None: another entry was there. Raises BusError, in which case the entry may or may not be stored.
        """
        return await self._bus.compare_and_set(
            self._subject(account_id), encode(account), over, timeout_s=self._call_limit_s
        )

    def _subject(self, account_id: str) -> str:
        return subjects.kv_subject(subjects.QUOTAS_BUCKET, subjects.escape(account_id))
