"""Shared parts of all pages: the login, the ledger's reader, and error pages."""

import logging
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from typing import Any

from fastapi import Request
from fastapi.routing import APIRoute
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.ext.asyncio import AsyncConnection
from starlette.responses import RedirectResponse, Response

from console.admin.routes import principal_answer
from console.admin.service import AdminService
from console.dashboard.alerts import Alerts
from console.dashboard.exports import Exports
from console.dashboard.live import Live, LiveNumbers
from console.dashboard.reader import Reader
from console.dashboard.render import html, render
from console.dashboard.view import View, make_view, view_of
from console.login.login import Login
from console.login.sessions import Session
from console.rules import admit, person_of
from db.accounts.errors import PrincipalError
from db.engine import describe
from gateway.api.errors import form_of
from gateway.errors import LedgerUnavailable, LoginRequired, Refused, UnknownUrl
from gateway.mount import GatewayParts

log = logging.getLogger(__name__)

Ask = Callable[[AsyncConnection, View], Awaitable[dict[str, Any] | None]]


class Pages:
    """Serves pages to logged-in users."""

    def __init__(
        self, gateway: GatewayParts, admin: AdminService, login: Login, reader: Reader, *, grafana_url: str | None
    ) -> None:
        """``reader`` reads the ledger, ``gateway`` has the live numbers."""
        self._grafana_url = grafana_url
        self.live = Live(gateway)
        self.alerts = Alerts(gateway, reader)
        self.exports = Exports(reader)
        self.gateway = gateway
        self.admin = admin
        self.sessions = login.sessions
        self._login = login
        self._reader = reader

    async def require_login(self, request: Request) -> None:
        """Store the session of a request in its state, if its role may use the route.

        Raises LoginRequired, CrossOriginRequest, NotAllowed, RoleNotAllowed,
        and SQL's own errors.
        """
        session = await self._login.require(request)
        request.state.session = session  # before it is admitted: the page of a refusal has the user's own navigation
        admit(request, session.person)

    def user(self, request: Request) -> Session:
        """Return the session that ``require_login`` has stored."""
        session: Session = request.state.session
        return session

    def endpoint(self, request: Request) -> str:
        """Return the address of the API that clients are to use."""
        return f"{self._login.public_url(request)}/v1"

    def live_numbers(self, request: Request) -> LiveNumbers | None:
        """Return the live numbers of the installation; None if the user does not see it."""
        return self.live.numbers() if person_of(request).may("see_installation") else None

    async def show(self, request: Request, template: str, ask: Ask, **more: object) -> Response:
        """Return a page of the values that ``ask`` reads, which may name another template.

        Raises UnknownUrl if it returns None, and its errors.
        """
        view, user = view_of(request), self.user(request)
        frame = await self._frame(request)

        async def rendered(connection: AsyncConnection) -> str:
            values = await ask(connection, view)
            if values is None:
                raise UnknownUrl("Not found.")
            return render(values.get("template", template), values.get("view", view), user, {**frame, **values, **more})

        return html(await self._reader.read(rendered))

    async def find(self, request: Request, ask: Callable[[AsyncConnection, View], Awaitable[str | None]]) -> Response:
        """Redirect to the URL that ``ask`` returns. Raises UnknownUrl if it returns None, and its errors."""
        view = view_of(request)
        found = await self._reader.read(lambda connection: ask(connection, view))
        if found is None:
            raise UnknownUrl("No request, batch, key or team matches. Search for requests by their full ID.")
        return RedirectResponse(found, 303)

    async def show_memory(self, request: Request, template: str, values: Mapping[str, Any]) -> Response:
        """Return a page, or a part of one, that needs no ledger."""
        shown = {**await self._frame(request), **values}
        return html(render(template, view_of(request), self.user(request), shown))

    async def _frame(self, request: Request) -> dict[str, Any]:
        """Return what the frame of a page shows. A part of a page has none, and some users do not see alerts."""
        has_alerts = "hx-request" not in request.headers and person_of(request).may("see_installation")
        return {"alerts": await self.alerts.now() if has_alerts else (), "grafana_url": self._grafana_url}


class PageRoute(APIRoute):
    """Shows errors as pages."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """Wrap FastAPI's handler with error pages."""
        handle = super().get_route_handler()

        async def handle_with_error_page(request: Request) -> Response:
            try:
                return await handle(request)
            except LoginRequired:
                if "hx-request" in request.headers:  # a part of a page: reload the whole page to show the login
                    return Response(status_code=401, headers={"hx-refresh": "true"})
                raise
            except Refused as error:
                return _error_page(request, error)
            except PrincipalError as error:
                return _error_page(request, principal_answer(error))
            except (SQLAlchemyError, OSError) as error:
                log.error("cannot show a page: %s", describe(error))  # noqa: TRY400  # SQL is down
                return _error_page(request, LedgerUnavailable())

        return handle_with_error_page


def _error_page(request: Request, error: Refused) -> Response:
    view = make_view({}, request.cookies)
    values = {"page": "", "message": error.message}
    return html(
        render("error.html", view, getattr(request.state, "session", None), values),
        form_of(error).status,
    )
