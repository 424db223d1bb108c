"""/login/oidc: to the issuer and back."""

import hmac
import time
from collections.abc import Awaitable, Callable
from dataclasses import asdict
from typing import Any, Final

from fastapi import APIRouter, Request
from joserfc import jwt
from joserfc.errors import JoseError
from joserfc.jwk import OctKey
from joserfc.jwt import JWTClaimsRegistry
from pydantic import SecretStr
from starlette.responses import RedirectResponse, Response

from console.login.login import Login, local_page
from console.login.oidc import AuthorizationRequest, OidcLogin
from console.settings import OidcSettings
from db.accounts.errors import OidcError, OidcNotAllowed

COOKIE: Final = "spillway_oidc"
CALLBACK_PATH: Final = "/login/oidc/callback"
LOGIN_COOKIE_S: Final = 600  # how long a user may take at the issuer
ALGORITHM: Final = "HS256"

Form = Callable[[str, str | None, int], Awaitable[Response]]


def oidc_router(login: Login, settings: OidcSettings, pepper: SecretStr, form: Form) -> APIRouter:
    """Build the router of the login by the issuer; ``form`` shows the login page with an error."""
    router = APIRouter(prefix="/login/oidc", include_in_schema=False)
    issuer, key = OidcLogin(settings), _key(pepper)

    @router.get("")
    async def start(request: Request, next: str = "") -> Response:  # noqa: A002  # its name in the URL
        try:
            url, asked = await issuer.authorization_request(login.public_url(request) + CALLBACK_PATH)
        except OidcError as error:
            return await form(next, str(error), 502)
        response = RedirectResponse(url, 303)
        kept = {**asdict(asked), "next": local_page(next), "exp": int(time.time()) + LOGIN_COOKIE_S}
        login.set_cookie(request, response, COOKIE, jwt.encode({"alg": ALGORITHM}, kept, key), LOGIN_COOKIE_S)
        return response

    @router.get("/callback")
    async def callback(request: Request) -> Response:
        next_page = ""
        try:
            kept = _kept(request.cookies.get(COOKIE, ""), key)
            next_page = kept["next"]
            asked = AuthorizationRequest(kept["state"], kept["nonce"], kept["verifier"])
            user = await issuer.user(asked, login.public_url(request) + CALLBACK_PATH, dict(request.query_params))
            response = await login.start_sso(request, user, next_page)
        except OidcError as error:
            if isinstance(error, OidcNotAllowed):
                await login.note_failure(request, error.user)
            response = await form(next_page, str(error), 401)
        login.set_cookie(request, response, COOKIE, "", 0)
        return response

    return router


def _kept(cookie: str, key: OctKey) -> dict[str, Any]:
    """Return the claims of the signed cookie of a pending login. Raises OidcError."""
    try:
        claims = jwt.decode(cookie, key, algorithms=[ALGORITHM]).claims
        JWTClaimsRegistry(exp={"essential": True}).validate(claims)
    except (JoseError, ValueError) as error:
        raise OidcError("The login expired or was started in another browser. Try again.") from error
    return claims


def _key(pepper: SecretStr) -> OctKey:
    return OctKey.import_key(hmac.digest(pepper.get_secret_value().encode(), b"oidc login", "sha256"))
