"""Permissions for hosted APIs, by provider and model: none, unless a key, team or configuration gives them.

A leave is ``provider`` or ``provider/model``, both with ``*`` as in file names: ``openai``, ``openai/gpt-*``, ``*``.

    team (or [tenants.X] where it says nothing)  AND  key (or everything that its team may, where it says nothing)

A key narrows what its team may, and never widens it. One that nobody has put into a team speaks for itself. Whoever
demands trusted pools goes to no hosted API, whatever else is said.
"""

from collections.abc import Iterable
from fnmatch import fnmatchcase
from typing import Final

from db.accounts.principal import DEFAULT_TEAM_ID, Principal

MAX_LEAVE_CHARS: Final = 200

Leaves = tuple[str, ...]  # empty: none


def why_no_leave(text: str) -> str | None:
    """Return what is wrong with an ``allow_hosted`` permission, or None."""
    provider, slash, model = text.partition("/")
    if not provider or (slash and not model) or len(text) > MAX_LEAVE_CHARS or not text.isprintable() or " " in text:
        return f"{text[:MAX_LEAVE_CHARS]!r} is not provider or provider/model, such as openai or openai/gpt-*"
    return None


def allowed_providers(
    principal: Principal, configured: Leaves | None, providers: Iterable[str], model: str
) -> tuple[str, ...]:
    """Return those of ``providers`` to which the client's prompts for a model may go.

    ``configured``: what the configuration says of the tenant; None: nothing.
    """
    team, key = principal.team_policy.allow_hosted, principal.key_policy.allow_hosted
    team = configured if team is None else team
    if team is None and principal.team_id == DEFAULT_TEAM_ID:
        team, key = key, None
    if not team or principal.trusted_only:
        return ()
    return tuple(one for one in providers if _allows(team, one, model) and (key is None or _allows(key, one, model)))


def _allows(leaves: Leaves, provider: str, model: str) -> bool:
    for leave in leaves:
        allowed_provider, _, allowed_model = leave.partition("/")
        if fnmatchcase(provider, allowed_provider) and fnmatchcase(model, allowed_model or "*"):
            return True
    return False
