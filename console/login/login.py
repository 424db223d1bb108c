"""Who is at the browser: the session's cookie, the local password, and the issuer's word."""

import asyncio
import contextlib
import hmac
import logging
import secrets
import time
from collections.abc import AsyncIterator, Mapping
from typing import Final
from urllib.parse import urlencode

from joserfc import jwt
from joserfc.errors import JoseError
from joserfc.jwk import OctKey
from joserfc.jwt import JWTClaimsRegistry
from pydantic import SecretStr
from sqlalchemy.ext.asyncio import AsyncEngine
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response

from accounts.errors import TooManyLogins, WrongPassword
from console.login.admins import check_password
from console.login.sessions import Session, SessionStore
from console.login.throttle import LoginThrottle
from console.settings import ConsoleSettings
from web.errors import CrossOriginRequest, LoginRequired

COOKIE: Final = "spillway_session"
BROWSER_COOKIE: Final = "spillway_browser"  # this person has logged in by this browser before; it logs nobody in
BROWSER_S: Final = 180 * 24 * 3600.0
ALGORITHM: Final = "HS256"
SAFE_METHODS: Final = frozenset({"GET", "HEAD", "OPTIONS"})  # they change nothing (RFC 9110, section 9.2.1)
FIRST_PAGE: Final = "/dashboard"
MAX_WAITING_PASSWORDS: Final = 8  # each takes memory and 0.1 s of a core

log = logging.getLogger(__name__)


class Login:
    """Logs people in and out, and tells whose request it is."""

    def __init__(self, database: AsyncEngine, settings: ConsoleSettings) -> None:
        self.settings = settings.login
        self.database = database
        self._sessions = SessionStore(database, settings.key_pepper, settings.login.session_s)
        self._browser_key = _browser_key(settings.key_pepper)
        self._throttle = LoginThrottle()
        self._strangers, self._known = _Desk(), _Desk()

    async def current(self, request: Request) -> Session | None:
        """Who has sent this request; None if he has not logged in. Raises SQL's own errors."""
        token = request.cookies.get(COOKIE)
        return None if token is None else await self._sessions.find(token)

    async def require(self, request: Request) -> Session:
        """Return the session of a request. Raises LoginRequired, CrossOriginRequest and SQL's own errors."""
        session = await self.current(request)
        if session is None:
            raise LoginRequired("Log in first: this needs a session.")
        refuse_foreign_origin(request)
        return session

    async def check_password(self, request: Request, name: str, password: str) -> None:
        """Return if the password is right. Raises WrongPassword, TooManyLogins, and SQL's own errors."""
        address = request.client.host if request.client else ""
        browser = self._throttle.begin(name, address, self._known_browser(request, name))
        desk = self._strangers if browser is None else self._known
        try:
            async with desk.place():
                await check_password(self.database, name, password)
        except WrongPassword:
            log.warning("a wrong password for %r from %s", name[:100], address)
            raise
        self._throttle.succeeded(name, address, browser)

    def _known_browser(self, request: Request, name: str) -> str | None:
        """The id of the browser if this person has logged in by it, as its cookie says in our own hand."""
        try:
            claims = jwt.decode(request.cookies.get(BROWSER_COOKIE, ""), self._browser_key, [ALGORITHM]).claims
            JWTClaimsRegistry(exp={"essential": True}, sub={"essential": True, "value": name}).validate(claims)
        except (JoseError, ValueError):
            return None
        return str(claims["jti"])

    async def start(self, request: Request, user: str, next_page: str) -> Response:
        """Start a session; returns the answer that gives its cookie and leads on. Raises SQL's own errors."""
        response = RedirectResponse(local_page(next_page), 303)
        token = await self._sessions.start(user)
        self.set_cookie(request, response, COOKIE, token, int(self.settings.session_s))
        known = {"sub": user, "jti": secrets.token_hex(8), "exp": int(time.time() + BROWSER_S)}
        signed = jwt.encode({"alg": ALGORITHM}, known, self._browser_key)
        self.set_cookie(request, response, BROWSER_COOKIE, signed, int(BROWSER_S))
        log.info("%s has logged in", user)
        return response

    async def end(self, request: Request) -> Response:
        """End the session; returns the answer that takes its cookie away. Raises SQL's own errors."""
        token = request.cookies.get(COOKIE)
        if token is not None:
            await self._sessions.end(token)
        response = RedirectResponse("/login", 303)
        self.set_cookie(request, response, COOKIE, "", 0)
        return response

    def set_cookie(self, request: Request, response: Response, name: str, value: str, max_age_s: int) -> None:
        """Set a cookie that no script and no other site's form can use."""
        is_tls = self.public_url(request).startswith("https:")
        response.set_cookie(name, value, max_age=max_age_s, httponly=True, samesite="lax", secure=is_tls)

    def public_url(self, request: Request) -> str:
        """How people reach this gateway, without a slash at its end."""
        return (self.settings.public_url or str(request.base_url)).rstrip("/")


class _Desk:
    """One password at a time, and few that wait."""

    def __init__(self) -> None:
        self._one_password = asyncio.Lock()
        self._waiting = 0

    @contextlib.asynccontextmanager
    async def place(self) -> AsyncIterator[None]:
        """Wait for one's turn. Raises TooManyLogins."""
        if self._waiting >= MAX_WAITING_PASSWORDS:
            raise TooManyLogins("Too many people log in at the moment: try again.")
        self._waiting += 1
        try:
            async with self._one_password:
                yield
        finally:
            self._waiting -= 1


def _browser_key(pepper: SecretStr) -> OctKey:
    return OctKey.import_key(hmac.digest(pepper.get_secret_value().encode(), b"known browser", "sha256"))


def refuse_foreign_origin(request: Request) -> None:
    """Refuse a change that another site's page has asked for (cross-site request forgery). Raises CrossOriginRequest.

    Browsers say where a request comes from, in Sec-Fetch-Site or else in Origin, and pages cannot change that; what
    says neither is no browser. This comes on top of the cookie's SameSite.
    """
    if request.method in SAFE_METHODS:
        return
    headers: Mapping[str, str] = request.headers
    site, origin = headers.get("sec-fetch-site"), headers.get("origin")
    is_ours = site in {"same-origin", "none"} if site else origin is None or _host_of(origin) == headers.get("host")
    if not is_ours:
        raise CrossOriginRequest("A page of another site has asked for this change: it was not made.")


def login_page(next_page: str) -> str:
    """The login page that leads on to ``next_page``."""
    return "/login?" + urlencode({"next": next_page})


def local_page(wanted: str) -> str:
    """``wanted`` if it is a page of ours, else the first page: nobody is led elsewhere after a login."""
    is_local = wanted.startswith("/") and not wanted.startswith(("//", "/\\"))
    return wanted if is_local and wanted.isprintable() else FIRST_PAGE


def _host_of(origin: str) -> str:
    return origin.partition("://")[2]
