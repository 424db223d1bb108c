"""The shared truth about one key's or team's limits, and the one way in which a gateway changes it. No I/O here.

For each kind, at every moment:   used + held by all gateways <= limit,   where "used" is, of a rate, what was admitted
in the last ``WINDOW_S``; of money, what was spent in the period; of concurrency, nothing. What a vanished gateway held
counts as used: it may have been.
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

# A rate's amounts are kept by whole seconds: one admitted at second 0.9 counts until 61.0, so that no 60 s hold more
# than the limit. What this costs is at most a 61st of it.
WINDOW_S: Final = 61
LEASE_S: Final = 5.0
# What the clocks of two gateways may differ by: so much later than its own clock says is a lease over for the others.
CLOCK_SLACK_S: Final = 1.0
# Of what is free, one gateway may take this share ahead of its requests; the rest is for those of others.
AHEAD_SHARE: Final = 16

EMPTY: Final = Account(v=PROTOCOL_VERSION)


class Report(Struct, frozen=True):
    """A gateway's report of its slice, and what it asks for."""

    used: tuple[dict[int, int], dict[int, int]]  # of RATES, since its last report; may be negative: refunded
    spent_nano_usd: int  # in ``period``, since its last report
    period: str  # of what it tells about money
    held: Amounts
    idle: Amounts
    needs: tuple[Amounts, ...] = ()  # of each request that waits, in order
    ahead: Amounts = NOTHING  # what will soon be needed


class Exchanged(Struct, frozen=True):
    """Result of a report."""

    account: Account
    granted: Amounts
    expires_unix_ms: int


def exchange(
    account: Account, gateway_id: str, report: Report, terms: Limits, *, number: int, now_s: float
) -> Exchanged:
    """Take a report into the account and lease what there is; ``number`` tells this exchange from the gateway's others.

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
    granted = _granted(free, idle, report, terms.limits)
    expires_unix_ms = int((now_s + LEASE_S) * 1000)
    lease = Lease(number, expires_unix_ms, plus(held, granted), plus(idle, granted), reported)
    return Exchanged(replace(account, leases={**others, gateway_id: lease}), granted, expires_unix_ms)


def as_of(account: Account, terms: Limits, now_s: float, *, but: str = "") -> Account:
    """The account as it is now, though nobody has written it since; the lease of gateway ``but`` never runs out."""
    return _without_the_past(_without_the_vanished(account, but, now_s), terms, now_s)


def recounted(
    account: Account, terms: Limits, ledger_nano_usd: int, by_vanished: Mapping[str, int], now_s: float
) -> Account:
    """The account with what the ledger says was spent in this period in the place of what is only presumed.

    What living gateways have reported may not have reached the ledger yet, so it counts in any case. ``by_vanished``:
    nano-USD that each vanished gateway's requests cost, what it had reported among them; none of them may be missing.
    """
    account = _without_the_past(account, terms, now_s)
    reported = account.spent_nano_usd - account.presumed_nano_usd
    for gateway_id, gone in account.vanished.items():
        reported += max(0, by_vanished.get(gateway_id, 0) - gone.spent_nano_usd)
    return replace(account, spent_nano_usd=max(reported, ledger_nano_usd), presumed_nano_usd=0, vanished={})


def merged(account: Account, known: Account) -> Account:
    """An account made again of an older copy, with what a newer one says was used and spent: it was, at least."""
    used = tuple(
        {at: max(seconds.get(at, 0), more.get(at, 0)) for at in seconds.keys() | more.keys()}
        for seconds, more in zip(account.used, known.used, strict=True)
    )
    account = replace(account, used=used)
    if known.period != account.period:
        return account
    return replace(account, spent_nano_usd=max(account.spent_nano_usd, known.spent_nano_usd - known.presumed_nano_usd))


def used_amounts(account: Account) -> Amounts:
    """Return what counts as used now, as far as it was reported to the account."""
    requests, tokens = (sum(seconds.values()) for seconds in account.used)
    return requests, tokens, 0, account.spent_nano_usd


def free_amounts(account: Account, limits: LimitValues, held_besides: Amounts = NOTHING) -> Amounts:
    """Return what is neither used nor held; 0 of what has no limit."""
    used = used_amounts(account)
    held = [held_besides, *(lease.held for lease in account.leases.values())]

    def free_of(kind: Kind) -> int:
        limit = limits[kind]
        return 0 if limit is None else max(0, limit - used[kind] - sum(one[kind] for one in held))

    return free_of(Kind.REQUESTS), free_of(Kind.TOKENS), free_of(Kind.CONCURRENT), free_of(Kind.MONEY)


def _granted(free: Amounts, idle: Amounts, report: Report, limits: LimitValues) -> Amounts:
    """Grant those that wait, in order, as far as all suffices; then something ahead of what will come."""
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
    """End the leases that ran out: what they held of rates and money counts as used, concurrency comes back."""
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
    """Count what a gateway held as not spent: it is back, and tells what was."""
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
    """Both added up, without what is out of the window or has come to nothing."""
    whole = {at: seconds.get(at, 0) + fields.get(at, 0) for at in seconds.keys() | fields.keys()}
    return {at: used for at, used in whole.items() if at > oldest and used > 0}


# --- the bucket -------------------------------------------------------------------------------------------------------
#
# The bucket of accounts: each is replaced only by who has read what is there.

STREAM: Final = f"KV_{subjects.QUOTAS_BUCKET}"


async def created_s(bus: Bus) -> float:
    """Return when the bucket was made, by the queue server's clock: it is another one after a loss. Raises BusError."""
    info = await bus.api(f"STREAM.INFO.{STREAM}")
    try:
        return datetime.fromisoformat(info["created"]).timestamp()
    except (KeyError, ValueError) as error:
        raise BusError("the queue server does not tell when the accounts of limits were made") from error


class AccountStore:
    """The bucket, as one gateway uses it."""

    def __init__(self, bus: Bus, call_limit_s: float = REACH_LIMIT_S) -> None:
        self._bus = bus
        self._call_limit_s = call_limit_s

    async def load(self, account_id: str) -> tuple[Account, int] | None:
        """An account and the sequence of its entry; None: there is none. Raises BusError or ProtocolError."""
        found = await self._bus.get_message(STREAM, last_by_subj=self._subject(account_id))
        if found is None:
            return None
        return decode_account(base64.b64decode(found["data"])), int(found["seq"])

    async def store(self, account_id: str, account: Account, over: int) -> int | None:
        """Put an account in the place of the entry with sequence ``over`` (0: of none); returns the new sequence.

        None: another entry stands there. Raises BusError: nobody knows whether it was stored.
        """
        return await self._bus.compare_and_set(
            self._subject(account_id), encode(account), over, timeout_s=self._call_limit_s
        )

    def _subject(self, account_id: str) -> str:
        return subjects.kv_subject(subjects.QUOTAS_BUCKET, subjects.escape(account_id))
