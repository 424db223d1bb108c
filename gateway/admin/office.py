"""What every route of the admin API does: ask who it is, read the body, tell the gateways."""

import logging
from typing import TypeVar

from fastapi import Request
from sqlalchemy.ext.asyncio import AsyncEngine

from gateway.admin.schema import AdminBody
from gateway.api.routes import exchange_of
from gateway.api.schema import parse_body
from gateway.api.services import Services
from gateway.auth.principal import ADMIN
from gateway.limits.body import read_body
from gateway.settings import GatewaySettings
from protocol import subjects
from protocol.errors import BusError

log = logging.getLogger(__name__)

_Body = TypeVar("_Body", bound=AdminBody)


class Office:
    """The parts of a gateway that the admin API works with."""

    def __init__(self, services: Services) -> None:
        self.settings: GatewaySettings = services.settings
        self.database: AsyncEngine = services.database
        self._services = services

    async def actor(self, request: Request) -> str:
        """Who asks, as the audit log calls him: by his key if he sends one, else by his session.

        Raises InvalidApiKey, MissingScope, LoginRequired, ForeignOrigin, and SQL's own errors.
        """
        exchange = exchange_of(request)
        if b"authorization" in exchange.headers:
            return f"key:{exchange.authenticate(self._services.keys, ADMIN).key_id}"
        return (await self._services.login.require(request)).actor

    async def body(self, request: Request, kind: type[_Body]) -> _Body:
        """The body, within its limits; none is an empty one.

        Raises BodyTooLarge, BodyTooSlow, ClientDisconnected, MalformedJson and InvalidParameter.
        """
        length, limits = request.headers.get("content-length", "").encode(), self.settings.limits
        body = await read_body(request.receive, length, limits.max_body_bytes, self.settings.timeouts.body_s)
        return parse_body(kind, body or b"{}")

    async def tell_gateways(self) -> None:
        """Have all gateways load the keys now; without it they do so within half a minute."""
        try:
            await self._services.bus.publish(subjects.KEYS_CHANGED_SUBJECT, b"")
        except BusError as error:
            log.warning("other gateways will see the change within half a minute: %s", error)
