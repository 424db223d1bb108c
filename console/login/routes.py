"""/login and /logout."""

from fastapi import APIRouter, FastAPI, Request
from starlette.responses import RedirectResponse, Response

from console.login.admins import ADMIN_NAME, has_admin
from console.login.forms import read_form
from console.login.login import SAFE_METHODS, Login, local_page, login_page, refuse_foreign_origin
from console.login.oidc_routes import oidc_router
from console.login.pages import page
from db.accounts.errors import LoginError, TooManyLogins
from gateway.errors import LoginRequired
from gateway.http.pages import refuse


def login_router(login: Login) -> APIRouter:
    """Build the router of the login and logout forms."""
    router = APIRouter(include_in_schema=False)

    async def form(next_page: str, problem: str | None, status: int) -> Response:
        return page(
            "login.html",
            status,
            problem=problem,
            next_page=local_page(next_page),
            name=ADMIN_NAME,
            has_password=await has_admin(login.database),
            has_oidc=login.settings.oidc is not None,
        )

    @router.get("/login")
    async def show_form(next: str = "") -> Response:  # noqa: A002  # its name in the URL
        return await form(next, None, 200)

    @router.post("/login")
    async def log_in(request: Request) -> Response:
        refuse_foreign_origin(request)
        fields = await read_form(request)
        name, next_page = fields.get("name", ""), fields.get("next", "")
        try:
            await login.check_password(request, name, fields.get("password", ""))
        except LoginError as error:
            return await form(next_page, str(error), 429 if isinstance(error, TooManyLogins) else 401)
        return await login.start(request, name, next_page, "owner")

    if login.settings.oidc is not None:
        router.include_router(oidc_router(login, login.settings.oidc, login.key_pepper, form))

    @router.post("/logout")
    async def log_out(request: Request) -> Response:
        refuse_foreign_origin(request)
        return await login.end(request)

    return router


def add_login_answers(app: FastAPI) -> None:
    """Register the redirect to the login page for browsers without a session."""

    @app.exception_handler(LoginRequired)
    async def on_login_required(request: Request, error: LoginRequired) -> Response:
        wants_page = request.method in SAFE_METHODS and "text/html" in request.headers.get("accept", "")
        if not wants_page:
            return refuse(request, error)
        query = f"?{request.url.query}" if request.url.query else ""
        return RedirectResponse(login_page(request.url.path + query), 303)
