"""What every page has in common: the login, the ledger's reader, and errors as pages."""

import logging
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from typing import Any

from fastapi import Request
from fastapi.routing import APIRoute
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.ext.asyncio import AsyncConnection
from starlette.responses import Response

from accounts.errors import PrincipalError
from console.admin.routes import principal_answer
from console.admin.service import AdminService
from console.dashboard.exports import Exports
from console.dashboard.live import Live
from console.dashboard.render import html, render
from console.dashboard.view import View, make_view, view_of
from console.login.sessions import Session
from console.services import ConsoleServices
from db.errors import describe
from web.errors import ApiError, LedgerUnavailable, LoginRequired, UnknownUrl

log = logging.getLogger(__name__)

Ask = Callable[[AsyncConnection, View], Awaitable[dict[str, Any] | None]]


class Pages:
    """Shows pages to whoever has logged in."""

    def __init__(self, services: ConsoleServices) -> None:
        self.live = Live(services.gateway)
        self.exports = Exports(services.reader, services.settings.data_dir / "exports")
        self.services = services
        self.admin = AdminService(services)

    async def require_login(self, request: Request) -> None:
        """Note who has sent this request. Raises LoginRequired, CrossOriginRequest, SQL's own errors."""
        request.state.session = await self.services.login.require(request)

    def user(self, request: Request) -> Session:
        """Who has sent this request."""
        session: Session = request.state.session
        return session

    async def show(self, request: Request, template: str, ask: Ask, **more: object) -> Response:
        """A page of what ``ask`` finds in the ledger. Raises UnknownUrl where it finds nothing, and what it raises."""
        view, user = view_of(request), self.user(request).user

        async def rendered(connection: AsyncConnection) -> str:
            values = await ask(connection, view)
            if values is None:
                raise UnknownUrl("There is nothing of this name.")
            return render(template, values.get("view", view), user, {**values, **more})

        return html(await self.services.reader.read(rendered))

    def show_memory(self, request: Request, template: str, values: Mapping[str, Any]) -> Response:
        """A page, or a part of one, that needs no ledger."""
        return html(render(template, view_of(request), self.user(request).user, values))


class PageRoute(APIRoute):
    """Shows errors as pages."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """FastAPI's own handler, with our answer to errors."""
        handle = super().get_route_handler()

        async def handle_with_error_page(request: Request) -> Response:
            try:
                return await handle(request)
            except LoginRequired:
                if "hx-request" in request.headers:  # a part of a page: the whole page shall ask for the login
                    return Response(status_code=401, headers={"hx-refresh": "true"})
                raise
            except ApiError as error:
                return _error_page(request, error)
            except PrincipalError as error:
                return _error_page(request, principal_answer(error))
            except (SQLAlchemyError, OSError) as error:
                log.error("a page cannot be shown: %s", describe(error))  # noqa: TRY400  # SQL is away
                return _error_page(request, LedgerUnavailable())

        return handle_with_error_page


def _error_page(request: Request, error: ApiError) -> Response:
    view = make_view({}, request.cookies)
    return html(render("error.html", view, "", {"page": "", "message": error.message}), error.status)
