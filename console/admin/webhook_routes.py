"""``/admin/v1/webhooks``: endpoints of teams, and what was delivered to them."""

from typing import Annotated

from fastapi import APIRouter, Query, Request, Response

from console.admin import schema
from console.admin.service import AdminService
from console.admin.webhook_views import delivery_view, endpoint_view
from console.rules import person_of
from gateway.http.pages import body_schema, json_answer
from ledger.webhooks.deliveries import list_deliveries


def webhooks_router(admin: AdminService) -> APIRouter:
    """Build the router of webhook endpoints."""
    router = APIRouter(prefix="/webhooks", tags=["webhooks"])
    _add_endpoints(router, admin)
    _add_operations(router, admin)
    return router


def _add_endpoints(router: APIRouter, admin: AdminService) -> None:
    webhooks = admin.webhooks

    @router.get("")
    async def list_webhooks(request: Request, team: str | None = None) -> Response:
        """List the webhook endpoints, oldest first; only those of `team`, an id or name, if it is given."""
        data = [endpoint_view(endpoint) for endpoint in await admin.list_webhooks(person_of(request), team)]
        return json_answer({"object": "list", "data": data, "has_more": False})

    @router.post("", status_code=201, openapi_extra=body_schema("NewWebhook"))
    async def create_webhook(request: Request) -> Response:
        """Create a webhook endpoint of a team. Its `secret` is returned only in this response."""
        who = person_of(request)
        body = await admin.body(request, schema.NewWebhook)
        team = await admin.team_of("manage_webhooks", body.team, who)
        endpoint, secret = await webhooks.create(team.team_id, body.url, body.event_types, who.actor)
        return json_answer(endpoint_view(endpoint, secret), 201)

    @router.get("/{endpoint_id}")
    async def retrieve_webhook(request: Request, endpoint_id: str) -> Response:
        """Retrieve a webhook endpoint."""
        return json_answer(endpoint_view(await admin.find_webhook(endpoint_id, person_of(request))))

    @router.patch("/{endpoint_id}", openapi_extra=body_schema("WebhookChanges"))
    async def update_webhook(request: Request, endpoint_id: str) -> Response:
        """Change the given fields. What waits for an endpoint that is disabled is given up."""
        who = person_of(request)
        body = await admin.body(request, schema.WebhookChanges)
        await admin.find_webhook(endpoint_id, who)
        return json_answer(endpoint_view(await webhooks.update(endpoint_id, body.changes(), who.actor)))

    @router.delete("/{endpoint_id}")
    async def delete_webhook(request: Request, endpoint_id: str) -> Response:
        """Delete a webhook endpoint with its deliveries."""
        who = person_of(request)
        await admin.find_webhook(endpoint_id, who)
        return json_answer(endpoint_view(await webhooks.delete(endpoint_id, who.actor)))


def _add_operations(router: APIRouter, admin: AdminService) -> None:
    webhooks = admin.webhooks

    @router.post("/{endpoint_id}/rotate", openapi_extra=body_schema("Rotation"))
    async def rotate_webhook(request: Request, endpoint_id: str) -> Response:
        """Give the endpoint a new `secret`; for `grace_s` seconds, deliveries are signed by the previous one, too."""
        who = person_of(request)
        body = await admin.body(request, schema.Rotation)
        await admin.find_webhook(endpoint_id, who)
        return json_answer(endpoint_view(*await webhooks.rotate(endpoint_id, who.actor, body.grace_s)))

    @router.post("/{endpoint_id}/test", openapi_extra=body_schema("WebhookTest"))
    async def test_webhook(request: Request, endpoint_id: str) -> Response:
        """Send an event of `event_type`, or of the endpoint's first, about an object that does not exist."""
        who = person_of(request)
        body = await admin.body(request, schema.WebhookTest)
        await admin.find_webhook(endpoint_id, who)
        event_id = await webhooks.send_test(endpoint_id, body.event_type, who.actor)
        return json_answer({"object": "webhook_test", "event_id": event_id, "endpoint_id": endpoint_id})

    @router.get("/{endpoint_id}/deliveries")
    async def list_webhook_deliveries(
        request: Request, endpoint_id: str, query: Annotated[schema.DeliveriesQuery, Query()]
    ) -> Response:
        """List the latest deliveries to an endpoint, newest first, with how their last attempts ended."""
        endpoint = await admin.find_webhook(endpoint_id, person_of(request))
        found = await list_deliveries(admin.database, endpoint.endpoint_id, query.limit + 1)
        data = [delivery_view(delivery) for delivery in found[: query.limit]]
        return json_answer({"object": "list", "data": data, "has_more": len(found) > query.limit})
