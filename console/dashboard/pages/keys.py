"""Keys and budgets: keys and teams, their limits, and the use of these."""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from sqlalchemy.ext.asyncio import AsyncConnection

from console.dashboard.view import DAY_MS, View
from db.accounts.budgets import budget_warnings
from db.accounts.keys import ApiKey
from db.accounts.principal import DEFAULT_TEAM_ID, Limits, limits_of, period_start_s
from db.accounts.teams import Team
from gateway.errors import InsufficientQuota
from gateway.limits.report import LimitUsage, uses
from ledger.queries.refusals import Grouping, refusal_totals
from ledger.queries.traffic import Traffic, totals
from ledger.queries.window import Dimension, Filters, Window
from protocol.gateways import Kind

USED_DAYS: Final = 30
BLOCKED_MS: Final = 3_600_000  # a budget that has refused requests since then is shown as one that blocks
MAX_SHOWN: Final = 500  # keys, and teams; the admin API lists all

Usage = Mapping[str, tuple[LimitUsage, ...]]  # by the id of a key or team


@dataclass(frozen=True, slots=True)
class Accounts:
    """The keys and teams shown, with the use of their limits."""

    keys: Sequence[ApiKey]  # active ones first, then the newest
    teams: Sequence[Team]
    left_out: int  # keys and teams
    at_unix_ms: int
    usage: Usage | None = None  # None: the queue server does not answer

    @property
    def terms(self) -> dict[str, Limits]:
        """Limits by the id of an active key or of a team."""
        live = (key for key in self.keys if self.state_of(key) == "active")
        policies = [*((team.team_id, team.policy) for team in self.teams), *((key.key_id, key.policy) for key in live)]
        found = ((account_id, limits_of(policy)) for account_id, policy in policies)
        return {account_id: terms for account_id, terms in found if terms is not None}

    def warnings(self, unpriced: Sequence[str]) -> dict[str, list[str]]:
        """Return warnings about budgets, by id; ``unpriced``: the models without a price."""
        teams = {team.team_id: budget_warnings(team.policy, None, unpriced) for team in self.teams}
        return teams | {key.key_id: budget_warnings(key.policy, key.models, unpriced) for key in self.keys}

    def state_of(self, key: ApiKey) -> str:
        """Return the state of a key: "active", "expired" or "revoked"."""
        if key.revoked_unix_ms is not None:
            return "revoked"
        has_expired = key.expires_unix_ms is not None and key.expires_unix_ms <= self.at_unix_ms
        return "expired" if has_expired else "active"

    def named(self, account_id: str) -> list[ApiKey | Team]:
        """Return the key or team of this id, if it is shown."""
        teams = (team for team in self.teams if team.team_id == account_id)
        return [*teams, *(key for key in self.keys if key.key_id == account_id)]


def ranked(keys: Iterable[ApiKey], teams: Iterable[Team], now_unix_ms: int) -> Accounts:
    """Select the newest of the keys, active ones first, and of the teams."""
    newest = sorted(keys, key=lambda key: (key.revoked_unix_ms is not None, -key.created_unix_ms))
    ours = sorted(teams, key=lambda team: (team.team_id != DEFAULT_TEAM_ID, -team.created_unix_ms))
    left_out = max(0, len(newest) - MAX_SHOWN) + max(0, len(ours) - MAX_SHOWN)
    return Accounts(newest[:MAX_SHOWN], ours[:MAX_SHOWN], left_out, now_unix_ms)


async def account_lines(connection: AsyncConnection, view: View, accounts: Accounts) -> dict[str, Any]:
    """Return the values of keys.html and account.html."""
    window = Window(accounts.at_unix_ms - USED_DAYS * DAY_MS, accounts.at_unix_ms, view.zone)
    dimensions: tuple[Dimension, ...] = ("key", "team")
    last_hour = Window(accounts.at_unix_ms - BLOCKED_MS, accounts.at_unix_ms, view.zone)
    usage = accounts.usage
    return {
        "page": "Keys",
        "accounts": accounts,
        "usage": await _charged(connection, view, accounts) if usage is None else usage,
        "traffic": {
            sums.group[0]: sums
            for dimension in dimensions
            for sums in await totals(connection, window, where=view.scope, by=(dimension,))
        },
        "refused": await _refused(connection, window, view.scope),
        "blocked": await _refused(connection, last_hour, view.scope, code=InsufficientQuota.code),
        "NO_TRAFFIC": Traffic(("",)),
        "used_days": USED_DAYS,
    }


async def _refused(
    connection: AsyncConnection, window: Window, where: Filters, *, code: str | None = None
) -> dict[str, int]:
    """Return how many requests of each key and team were refused, with this code if there is one."""
    columns: tuple[Grouping, ...] = ("key_id", "team_id")
    found: dict[str, int] = defaultdict(int)
    for column in columns:
        totals_of = await refusal_totals(connection, window, where=where, by=(column, "code"))
        for (account_id, its_code), number in totals_of.items():
            if account_id and code in {None, its_code}:
                found[account_id] += number
    return dict(found)


async def _charged(connection: AsyncConnection, view: View, accounts: Accounts) -> Usage:
    """Compute the use of budgets from the ledger, which has no rates or concurrency, if the queue server is down."""
    terms, now_s = accounts.terms, accounts.at_unix_ms / 1000
    charged: dict[tuple[str, str], int] = {}  # by period and id
    for period in {one.budget_period for one in terms.values() if one.limits[Kind.MONEY] is not None}:
        window = Window(int(period_start_s(period, now_s) * 1000), accounts.at_unix_ms, view.zone)
        for dimension in ("key", "team"):
            for sums in await totals(connection, window, by=(dimension,)):
                charged[period, sums.group[0]] = sums.charge_nano_usd or 0
    return {
        account_id: uses(one, (None, None, None, charged.get((one.budget_period, account_id), 0)), now_s)
        for account_id, one in terms.items()
    }
