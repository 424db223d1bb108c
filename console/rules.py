"""Maps each route of the pages and of the admin API to its action in the table of db.accounts.roles.

A route that is missing here is refused to all roles, and fails a test.
"""

from collections.abc import Mapping
from typing import Final

from fastapi import Request

from db.accounts.roles import Action, Person
from gateway.errors import RoleNotAllowed

API: Final = "/admin/v1"

ROUTES: Final[Mapping[tuple[str, str], Action]] = {
    # Pages.
    ("GET", "/dashboard"): "see_usage",
    ("GET", "/dashboard/tokens"): "see_usage",
    ("GET", "/dashboard/tokens/heat"): "see_usage",
    ("GET", "/dashboard/latency"): "see_usage",
    ("GET", "/dashboard/latency/chart"): "see_usage",
    ("GET", "/dashboard/requests"): "see_usage",
    ("GET", "/dashboard/requests/rows"): "see_usage",
    ("GET", "/dashboard/requests/{request_id:path}"): "see_usage",
    ("GET", "/dashboard/refusals"): "see_usage",
    ("GET", "/dashboard/batches"): "see_usage",
    ("GET", "/dashboard/batches/running"): "see_usage",
    ("GET", "/dashboard/batches/{batch_id}"): "see_usage",
    ("GET", "/dashboard/search"): "see_usage",
    ("GET", "/dashboard/cost"): "see_installation",
    ("GET", "/dashboard/alerts"): "see_installation",
    ("GET", "/dashboard/alerts/strip"): "see_installation",
    ("GET", "/dashboard/models"): "see_installation",
    ("GET", "/dashboard/pools"): "see_installation",
    ("GET", "/dashboard/pools/now"): "see_installation",
    ("GET", "/dashboard/fleet"): "see_installation",
    ("GET", "/dashboard/set-aside"): "see_installation",
    ("GET", "/dashboard/live"): "see_installation",
    ("GET", "/dashboard/keys"): "see_usage",
    ("POST", "/dashboard/keys"): "make_keys",
    ("GET", "/dashboard/keys/{key_id}"): "see_usage",
    ("POST", "/dashboard/keys/{key_id}"): "change_keys",
    ("POST", "/dashboard/keys/{key_id}/rotate"): "change_keys",
    ("POST", "/dashboard/keys/{key_id}/revoke"): "change_keys",
    ("POST", "/dashboard/teams"): "manage_teams",
    ("GET", "/dashboard/teams/{team_id}"): "see_usage",
    ("POST", "/dashboard/teams/{team_id}"): "manage_teams",
    ("GET", "/dashboard/exports"): "export",
    ("POST", "/dashboard/exports"): "export",
    ("GET", "/dashboard/playground"): "use_playground",
    ("POST", "/dashboard/playground/key"): "use_playground",
    ("POST", "/dashboard/zone"): "use_pages",
    ("GET", "/dashboard/sessions"): "use_pages",
    ("GET", "/dashboard/audit"): "see_audit",
    ("GET", "/dashboard/webhooks"): "manage_webhooks",
    ("POST", "/dashboard/sessions/{session_id}/end"): "end_sessions",
    # The admin API.
    ("GET", f"{API}/organisations"): "see_installation",
    ("POST", f"{API}/organisations"): "manage_teams",
    ("GET", f"{API}/organisations/{{reference}}"): "see_installation",
    ("PATCH", f"{API}/organisations/{{reference}}"): "manage_teams",
    ("GET", f"{API}/teams"): "see_usage",
    ("POST", f"{API}/teams"): "manage_teams",
    ("GET", f"{API}/teams/{{reference}}"): "see_usage",
    ("PATCH", f"{API}/teams/{{reference}}"): "manage_teams",
    ("GET", f"{API}/keys"): "see_usage",
    ("POST", f"{API}/keys"): "make_keys",
    ("GET", f"{API}/keys/{{reference}}"): "see_usage",
    ("PATCH", f"{API}/keys/{{reference}}"): "change_keys",
    ("POST", f"{API}/keys/{{reference}}/rotate"): "change_keys",
    ("DELETE", f"{API}/keys/{{reference}}"): "change_keys",
    ("GET", f"{API}/usage"): "see_usage",
    ("GET", f"{API}/audit"): "see_audit",
    ("GET", f"{API}/webhooks"): "manage_webhooks",
    ("POST", f"{API}/webhooks"): "manage_webhooks",
    ("GET", f"{API}/webhooks/{{endpoint_id}}"): "manage_webhooks",
    ("PATCH", f"{API}/webhooks/{{endpoint_id}}"): "manage_webhooks",
    ("DELETE", f"{API}/webhooks/{{endpoint_id}}"): "manage_webhooks",
    ("POST", f"{API}/webhooks/{{endpoint_id}}/rotate"): "manage_webhooks",
    ("POST", f"{API}/webhooks/{{endpoint_id}}/test"): "manage_webhooks",
    ("GET", f"{API}/webhooks/{{endpoint_id}}/deliveries"): "manage_webhooks",
}


def admit(request: Request, person: Person, prefix: str = "") -> None:
    """Let a person use this route, and keep them for its handler. Raises NotAllowed and RoleNotAllowed.

    ``prefix``: of the router that the route's own router is included in. Whether the object of the request is within
    the person's teams is for the handler to ask.
    """
    path = request.scope["route"].path.removeprefix(prefix)
    action = ROUTES.get((request.method, prefix + path))
    if action is None:
        raise RoleNotAllowed("No role may use this route.")
    person.require(action)
    request.state.person = person


def person_of(request: Request) -> Person:
    """Return the person whom ``admit`` has let in."""
    person: Person = request.state.person
    return person
