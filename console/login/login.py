"""Logging users in and out, and identifying them by the cookie of their session."""

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

from console.login.admins import check_password
from console.login.oidc import OidcUser
from console.login.sessions import NewSession, Session, SessionStore
from console.login.throttle import LoginThrottle
from console.settings import LoginSettings
from db.accounts.audit import Change, record
from db.accounts.errors import OidcNotAllowed, TooManyLogins, UnknownTeam, WrongPassword
from db.accounts.masking import masked
from db.accounts.roles import TEAM_ROLES, Role
from db.accounts.teams import find_team
from db.engine import changing
from gateway.errors import CrossOriginRequest, LoginRequired

COOKIE: Final = "spillway_session"
BROWSER_COOKIE: Final = "spillway_browser"  # this user has logged in by this browser before; it grants no access
BROWSER_S: Final = 180 * 24 * 3600.0
ALGORITHM: Final = "HS256"
SAFE_METHODS: Final = frozenset({"GET", "HEAD", "OPTIONS"})  # RFC 9110, section 9.2.1
FIRST_PAGE: Final = "/dashboard"
MAX_WAITING_PASSWORDS: Final = 8  # each takes memory and 0.1 s of a core
MAX_AUDITED_CHARS: Final = 100  # of the name of a failed login
NO_TEAMS: Final[Mapping[str, Role]] = {}

log = logging.getLogger(__name__)


class Login:
    """Logs users in and out, and identifies the user of a request."""

    def __init__(self, database: AsyncEngine, settings: LoginSettings, key_pepper: SecretStr) -> None:
        self.settings = settings
        self.key_pepper = key_pepper
        self.database = database
        self.sessions = SessionStore(database, key_pepper, settings.session_s)
        self._browser_key = _browser_key(key_pepper)
        self._throttle = LoginThrottle()
        self._unknown_browsers, self._known_browsers = _PasswordQueue(), _PasswordQueue()

    async def current(self, request: Request) -> Session | None:
        """Return the session of a request; None if its user has not logged in. Raises SQL's own errors."""
        token = request.cookies.get(COOKIE)
        return None if token is None else await self.sessions.find(token)

    async def require(self, request: Request) -> Session:
        """Return the session of a request. Raises LoginRequired, CrossOriginRequest and SQL's own errors."""
        session = await self.current(request)
        if session is None:
            raise LoginRequired("Log in first.")
        refuse_foreign_origin(request)
        return session

    async def check_password(self, request: Request, name: str, password: str) -> None:
        """Check a user's password. Raises WrongPassword, TooManyLogins, and SQL's own errors."""
        address = _address(request)
        browser = self._throttle.begin(name, address, self._known_browser(request, name))
        queue = self._unknown_browsers if browser is None else self._known_browsers
        try:
            async with queue.slot():
                await check_password(self.database, name, password)
        except WrongPassword:
            log.warning("wrong password for %r from %s", name[:100], address)
            await self.note_failure(request, name)
            raise
        self._throttle.succeeded(name, address, browser)

    async def note_failure(self, request: Request, name: str) -> None:
        """Record a failed login in the audit log: of passwords, as many in a minute as the throttle lets through."""
        said = "".join(one for one in name[:MAX_AUDITED_CHARS] if one.isprintable())
        async with changing(self.database) as connection:
            await record(
                connection, Change(f"user:{said}", "login.failed", f"user:{said}", None, {"address": _address(request)})
            )

    def _known_browser(self, request: Request, name: str) -> str | None:
        """Return the id of the browser if this user has logged in by it, according to its signed cookie."""
        try:
            claims = jwt.decode(request.cookies.get(BROWSER_COOKIE, ""), self._browser_key, [ALGORITHM]).claims
            JWTClaimsRegistry(exp={"essential": True}, sub={"essential": True, "value": name}).validate(claims)
        except (JoseError, ValueError):
            return None
        return str(claims["jti"])

    async def start_sso(self, request: Request, user: OidcUser, next_page: str) -> Response:
        """Start the session of an issuer's user.

        Raises OidcNotAllowed if none of their teams exists, and SQL's own errors.
        """
        teams: dict[str, Role] = {}
        async with self.database.connect() as connection:
            for reference, role in user.teams.items():
                try:
                    teams[(await find_team(connection, reference)).team_id] = role
                except UnknownTeam:
                    log.warning("auth.oidc.roles names the team %r, which does not exist", reference)
        if user.role in TEAM_ROLES and not teams:
            named = ", ".join(user.teams)
            raise OidcNotAllowed(f"None of your teams exists here: {named}. Ask an admin to create one.", user.name)
        return await self.start(request, user.name, next_page, user.role, teams)

    async def start(
        self, request: Request, user: str, next_page: str, role: Role, teams: Mapping[str, Role] = NO_TEAMS
    ) -> Response:
        """Start a session; return the redirect that sets its cookie. Raises SQL's own errors."""
        response = RedirectResponse(local_page(next_page), 303)
        browser = request.headers.get("user-agent", "")
        token = await self.sessions.start(NewSession(user, role, teams, _address(request), browser))
        self.set_cookie(request, response, COOKIE, token, int(self.settings.session_s))
        known = {"sub": user, "jti": secrets.token_hex(8), "exp": int(time.time() + BROWSER_S)}
        signed = jwt.encode({"alg": ALGORITHM}, known, self._browser_key)
        self.set_cookie(request, response, BROWSER_COOKIE, signed, int(BROWSER_S))
        log.info("%s has logged in", user)
        return response

    async def end(self, request: Request) -> Response:
        """End the session; return the redirect that clears its cookie. Raises SQL's own errors."""
        token = request.cookies.get(COOKIE)
        if token is not None:
            await self.sessions.end(token)
        response = RedirectResponse("/login", 303)
        self.set_cookie(request, response, COOKIE, "", 0)
        return response

    def set_cookie(self, request: Request, response: Response, name: str, value: str, max_age_s: int) -> None:
        """Set a cookie that scripts and other sites' forms cannot use."""
        is_tls = self.public_url(request).startswith("https:")
        response.set_cookie(name, value, max_age=max_age_s, httponly=True, samesite="lax", secure=is_tls)

    def public_url(self, request: Request) -> str:
        """Return the public address of this gateway, without a trailing slash."""
        return (self.settings.public_url or str(request.base_url)).rstrip("/")


class _PasswordQueue:
    """Checks one password at a time, with a bounded number of waiters."""

    def __init__(self) -> None:
        self._one_password = asyncio.Lock()
        self._waiting = 0

    @contextlib.asynccontextmanager
    async def slot(self) -> AsyncIterator[None]:
        """Wait for the only slot, and hold it. Raises TooManyLogins."""
        if self._waiting >= MAX_WAITING_PASSWORDS:
            raise TooManyLogins("Too many logins at the moment. Try again.")
        self._waiting += 1
        try:
            async with self._one_password:
                yield
        finally:
            self._waiting -= 1


def _address(request: Request) -> str:
    return request.client.host if request.client else ""


def _browser_key(pepper: SecretStr) -> OctKey:
    return OctKey.import_key(hmac.digest(pepper.get_secret_value().encode(), b"known browser", "sha256"))


def refuse_foreign_origin(request: Request) -> None:
    """Refuse a change requested by another site's page (cross-site request forgery). Raises CrossOriginRequest.

    Browsers send the origin of a request, in Sec-Fetch-Site or else in Origin, and pages cannot change these headers; a
    client that sends neither is not a browser. This is in addition to the cookie's SameSite.
    """
    if request.method in SAFE_METHODS:
        return
    headers: Mapping[str, str] = request.headers
    site, origin = headers.get("sec-fetch-site"), headers.get("origin")
    is_ours = site in {"same-origin", "none"} if site else origin is None or _host_of(origin) == headers.get("host")
    if not is_ours:
        raise CrossOriginRequest("The request was refused: it came from a page of another site.")


def login_page(next_page: str) -> str:
    """Return the URL of the login page that redirects to ``next_page``."""
    return "/login?" + urlencode({"next": local_page(next_page)})


def local_page(target: str) -> str:
    """Return ``target`` if it is a page of this site, else the first page: a login must not redirect to other sites."""
    is_local = target.startswith("/") and not target.startswith(("//", "/\\"))
    # A key in a URL is not written into pages and other URLs.
    return target if is_local and target.isprintable() and masked(target) == target else FIRST_PAGE


def _host_of(origin: str) -> str:
    return origin.partition("://")[2]
