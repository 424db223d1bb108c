"""Roles and their permissions by team, for the pages and the admin API.

role      is for                        sees and changes
owner     the local login               everything
admin     operators, admin API keys     everything, except other users' sessions
manager   people responsible for a team their teams: usage, all keys, webhooks, changes, stored payloads
member    developers of a team          their teams: usage, keys; changes the keys that they created
viewer    read-only users               sees the whole installation, changes nothing
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal, get_args

from db.accounts.errors import InvalidField, NotAllowed
from db.accounts.principal import INFERENCE, POLICY_FIELDS, Policy

Role = Literal["owner", "admin", "manager", "member", "viewer"]
Action = Literal[
    "use_pages",  # time zone, own sessions
    "see_usage",  # usage, requests, refusals, batches, keys and teams with their limits
    "see_installation",  # machines, pools, costs of machines, items set aside, organizations
    "export",
    "read_payloads",  # stored prompts and answers
    "make_keys",
    "change_keys",  # change, rotate, revoke
    "manage_teams",  # teams and organisations, with their limits
    "manage_webhooks",
    "see_audit",
    "use_playground",
    "end_sessions",  # of other users; "own": only one's own sessions
]
Reach = Literal["all", "team", "own", "none"]  # everything; objects of their teams; of these, objects that they created

ROLES: Final[tuple[Role, ...]] = get_args(Role)  # most permissions first
ACTIONS: Final[tuple[Action, ...]] = get_args(Action)
TEAM_ROLES: Final[tuple[Role, ...]] = ("manager", "member")  # roles in a team, not in the installation

_Row = tuple[Reach, Reach, Reach, Reach, Reach]
_TABLE: Final[Mapping[Action, _Row]] = {
    #                     owner   admin   manager  member  viewer
    "use_pages": ("all", "all", "all", "all", "all"),
    "see_usage": ("all", "all", "team", "team", "all"),
    "see_installation": ("all", "all", "none", "none", "all"),
    "export": ("all", "all", "team", "team", "all"),
    "read_payloads": ("all", "all", "team", "none", "none"),
    "make_keys": ("all", "all", "team", "team", "none"),
    "change_keys": ("all", "all", "team", "own", "none"),
    "manage_teams": ("all", "all", "none", "none", "none"),
    "manage_webhooks": ("all", "all", "team", "none", "none"),
    "see_audit": ("all", "all", "team", "none", "all"),
    "use_playground": ("all", "all", "team", "team", "none"),
    "end_sessions": ("all", "own", "own", "own", "own"),
}
NO_TEAM: Final = ("team_none",)  # an empty filter would match all
_WORDS: Final[Mapping[Action, str]] = {
    "use_pages": "use the pages",
    "see_usage": "see usage",
    "see_installation": "see machines, pools and their costs",
    "export": "export requests",
    "read_payloads": "read stored prompts and answers",
    "make_keys": "create keys",
    "change_keys": "change, rotate or revoke this key",
    "manage_teams": "create or change teams and organizations",
    "manage_webhooks": "manage webhooks",
    "see_audit": "read the audit log",
    "use_playground": "use the playground",
    "end_sessions": "end other users' sessions",
}


def reach_of(role: Role, action: Action) -> Reach:
    return _TABLE[action][ROLES.index(role)]


@dataclass(frozen=True, slots=True)
class Person:
    """A user of the pages or the admin API: the user of a session, or a key with the scope ``admin``."""

    actor: str  # the name in the audit log
    role: Role  # for team roles, the highest one
    teams: Mapping[str, Role] = field(default_factory=dict)  # team roles by team id

    @property
    def team_ids(self) -> tuple[str, ...] | None:
        """The teams that this person is limited to; None: not limited to teams."""
        return (tuple(self.teams) or NO_TEAM) if self.role in TEAM_ROLES else None

    def teams_for(self, action: Action) -> tuple[str, ...] | None:
        """Return the teams in which this person may do an action with all objects; None: not limited to teams."""
        limits = self.team_ids
        return None if limits is None else tuple(one for one in self.teams if self.may(action, one)) or NO_TEAM

    def may(self, action: Action, team_id: str | None = None, made_by: str | None = None) -> bool:
        """Return whether an action is allowed, optionally on an object of this team, created by this actor."""
        if team_id is None or self.team_ids is None:
            held = {self.role, *(self.teams.values() if self.team_ids is not None else ())}
            return any(reach_of(role, action) != "none" for role in held)
        reach = reach_of(self.teams[team_id], action) if team_id in self.teams else "none"
        return reach in {"all", "team"} or (reach == "own" and made_by == self.actor)

    def require(self, action: Action, team_id: str | None = None, made_by: str | None = None) -> None:
        """Raise NotAllowed if an action is not allowed."""
        if not self.may(action, team_id, made_by):
            role = self.role if team_id is None else self.teams.get(team_id, self.role)
            raise NotAllowed(f"Your role ({role}) does not allow you to {_WORDS[action]}.")

    def sees_team(self, team_id: str) -> bool:
        """Return whether this person can see a team."""
        return self.may("see_usage", team_id)


def may_everything(actor: str) -> Person:
    """Return the Person of a key with the scope ``admin``."""
    return Person(actor, "admin")


# --- team-level changes of keys ------ ------------------------------------------------------------------------------
#
# A key's other settings, such as weight and consents, override its team's. Only an admin may change them.

TEAM_KEY_LIMITS: Final = ("requests_per_minute", "tokens_per_minute", "max_concurrent", "budget_nano_usd")
TEAM_KEY_FIELDS: Final = frozenset({*TEAM_KEY_LIMITS, "budget_period"})
MEMBER_KEY_CEILINGS: Final = (*TEAM_KEY_LIMITS, "expires_unix_ms")
TEAM_KEY_SCOPES: Final = frozenset({INFERENCE})
_FIELD_NAMES: Final = {"budget_nano_usd": "budget_usd"}


def check_team_scopes(scopes: Iterable[str]) -> None:
    """Reject scopes that only an admin may grant. Raises InvalidField."""
    for scope in scopes:
        if scope not in TEAM_KEY_SCOPES:
            raise InvalidField("scopes", f"only an admin can create, change or rotate keys with the scope {scope!r}")


def check_team_key(before: Policy, after: Policy, team: Policy) -> None:
    """Reject changes of a key's policy that only an admin may make. Raises InvalidField."""
    for name in POLICY_FIELDS:
        wanted, most = getattr(after, name), getattr(team, name)
        if wanted == getattr(before, name):
            continue
        if name not in TEAM_KEY_FIELDS:
            raise InvalidField(name, "only an admin can change this field")
        is_comparable = name != "budget_nano_usd" or after.budget_period == team.budget_period
        if name in TEAM_KEY_LIMITS and None not in {wanted, most} and is_comparable and wanted > most:
            raise InvalidField(_FIELD_NAMES.get(name, name), "is above the team's limit")


def check_member_key(before: Mapping[str, Any], after: Mapping[str, Any], set_by_others: Mapping[str, Any]) -> None:
    """Refuse a member's change that takes their key beyond what an admin or manager has set. Raises InvalidField.

    ``before``, ``after``: the key's settings. ``set_by_others``: the last values that others than the member have set.
    """
    for name in (*MEMBER_KEY_CEILINGS, "models", "budget_period"):
        wanted, most = after[name], set_by_others.get(name)
        if name == "budget_period":  # 50 USD a day are more than 50 USD a month
            is_beyond = set_by_others.get("budget_nano_usd") is not None
        elif most is None:
            is_beyond = False
        elif name == "models":
            is_beyond = wanted is None or not set(wanted) <= set(most)
        else:
            is_beyond = wanted is None or wanted > most
        if is_beyond and wanted != before[name]:
            raise InvalidField(
                _FIELD_NAMES.get(name, name), "an admin or manager set this limit: you may only lower it"
            )
