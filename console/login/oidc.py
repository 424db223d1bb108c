"""Login by an OpenID Connect issuer: authorization code with PKCE (RFC 7636), OpenID Connect Core 1.0, section 3.1.

The user is identified by the issuer's ID token. It is accepted if it is signed by one of the issuer's keys with an
asymmetric algorithm, is issued for this client, has not expired, and has the nonce of this browser's login.
"""

import asyncio
import base64
import hashlib
import hmac
import logging
import secrets
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import msgspec
from joserfc import jwt
from joserfc.errors import InvalidKeyIdError, JoseError
from joserfc.jwk import KeySet
from joserfc.jwt import JWTClaimsRegistry

from console.settings import OidcSettings
from db.accounts.errors import OidcError, OidcNotAllowed
from db.accounts.roles import ROLES, TEAM_ROLES, Role
from protocol.http_client import httpx
from protocol.wire import UNDECODABLE

DISCOVERY_PATH: Final = "/.well-known/openid-configuration"
# Never a symmetric one: anyone who knows the issuer's public key could sign with it.
ALGORITHMS: Final = ("RS256", "RS384", "RS512", "PS256", "PS384", "PS512", "ES256", "ES384", "EdDSA")
REQUEST_LIMIT_S: Final = 10.0  # also for reading the issuer's discovery document and keys together
FAILED_GAP_S: Final = 1.0  # after a failure, during which waiting and new logins fail without another request
MAX_DOCUMENT_BYTES: Final = 1024 * 1024
KEEP_S: Final = 3600.0  # discovery and keys
NEW_KEYS_GAP_S: Final = 60.0  # between two requests for an unknown key
CLOCK_LEEWAY_S: Final = 60
SECRET_BYTES: Final = 36  # 48 characters of a URL; RFC 7636 requires 43 to 128 of a verifier

UNREACHABLE: Final = "The issuer cannot be reached. Try again later."

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class AuthorizationRequest:
    """The secrets of one login at the issuer, kept until the browser returns."""

    state: str
    nonce: str
    verifier: str


@dataclass(frozen=True, slots=True)
class _Issuer:
    """The issuer's endpoints and keys."""

    authorization_endpoint: httpx.URL
    token_endpoint: httpx.URL
    keys: KeySet
    read_s: float  # monotonic clock


class OidcLogin:
    """Sends browsers to the issuer, and verifies the answer they return with."""

    def __init__(
        self,
        settings: OidcSettings,
        *,
        request_limit_s: float = REQUEST_LIMIT_S,
        new_keys_gap_s: float = NEW_KEYS_GAP_S,
    ) -> None:
        """``new_keys_gap_s``: between two requests for an unknown key."""
        self.new_keys_gap_s = new_keys_gap_s
        self._request_limit_s = request_limit_s
        self._settings = settings
        self._issuer_document: _Issuer | None = None
        self._failed_s = float("-inf")  # when it could not be reached; monotonic clock
        self._reading = asyncio.Lock()

    async def authorization_request(self, redirect_uri: str) -> tuple[str, AuthorizationRequest]:
        """Return the URL to send the browser to, and the secrets of this login. Raises OidcError."""
        issuer = await self._issuer()
        asked = AuthorizationRequest(*(secrets.token_urlsafe(SECRET_BYTES) for _ in range(3)))
        challenge = base64.urlsafe_b64encode(hashlib.sha256(asked.verifier.encode()).digest()).decode().rstrip("=")
        query = {
            "response_type": "code",
            "client_id": self._settings.client_id,
            "redirect_uri": redirect_uri,
            "scope": " ".join(self._settings.scopes),
            "state": asked.state,
            "nonce": asked.nonce,
            "code_challenge": challenge,
            "code_challenge_method": "S256",
        }
        return str(issuer.authorization_endpoint.copy_merge_params(query)), asked

    async def user(self, asked: AuthorizationRequest, redirect_uri: str, answer: Mapping[str, str]) -> "OidcUser":
        """Return the user of an answer in the callback's URL. Raises OidcError if they may not log in."""
        if not hmac.compare_digest(answer.get("state", "").encode(), asked.state.encode()):
            raise OidcError("This response belongs to another login. Try again.")
        if answer.get("iss", self._settings.issuer) != self._settings.issuer:  # RFC 9207
            raise OidcError("This response comes from another issuer.")
        if "code" not in answer:
            log.warning("the OIDC issuer refused a login: %r", answer.get("error", "no code")[:200])
            raise OidcError("The issuer refused the login.")
        claims = await self._claims(await self._id_token(asked, redirect_uri, answer["code"]), asked.nonce)
        return allowed_user(self._settings, claims)

    async def _id_token(self, asked: AuthorizationRequest, redirect_uri: str, code: str) -> str:
        issuer = await self._issuer()
        form = {
            "grant_type": "authorization_code",
            "code": code,
            "redirect_uri": redirect_uri,
            "code_verifier": asked.verifier,
        }
        client_id, secret = self._settings.client_id, self._settings.client_secret
        if secret is None:  # a public client, which names itself
            form["client_id"] = client_id
        auth = None if secret is None else (client_id, secret.get_secret_value())
        try:
            async with asyncio.timeout(self._request_limit_s), self._client() as client:
                token = await _object(client.stream("POST", issuer.token_endpoint, data=form, auth=auth))
        except (httpx.HTTPError, httpx.InvalidURL, TimeoutError, ValueError) as error:
            log.warning("the OIDC issuer returned no token: %r", error)
            raise OidcError("The issuer did not confirm the login.") from error
        id_token = token.get("id_token")
        if not isinstance(id_token, str):
            raise OidcError("The issuer returned no ID token.")
        return id_token

    async def _claims(self, id_token: str, nonce: str) -> dict[str, Any]:
        """Verify a token and return its claims. Raises OidcError."""
        client_id = self._settings.client_id
        registry = JWTClaimsRegistry(
            leeway=CLOCK_LEEWAY_S,
            iss={"essential": True, "value": self._settings.issuer},
            aud={"essential": True, "value": client_id},
            exp={"essential": True},
            iat={"essential": True},
            sub={"essential": True},
            nonce={"essential": True, "value": nonce},
        )
        try:
            claims = (await self._decoded(id_token)).claims
            registry.validate(claims)
        except (JoseError, ValueError) as error:
            log.warning("refused an invalid ID token: %s", error)
            raise OidcError("The issuer's ID token is invalid.") from error
        if isinstance(claims["aud"], list) and len(claims["aud"]) > 1 and claims.get("azp") != client_id:
            raise OidcError("The issuer's ID token is for another client.")
        return claims

    async def _decoded(self, id_token: str) -> jwt.Token:
        issuer = await self._issuer()
        try:
            return jwt.decode(id_token, issuer.keys, algorithms=ALGORITHMS)
        except InvalidKeyIdError:  # the issuer may have new keys
            newer = await self._issuer(oldest_s=time.monotonic() - self.new_keys_gap_s)
            return jwt.decode(id_token, newer.keys, algorithms=ALGORITHMS)

    async def _issuer(self, oldest_s: float | None = None) -> _Issuer:
        """Return the issuer's endpoints and keys, read again if older than ``oldest_s``. Raises OidcError."""
        async with self._reading:
            oldest_s = time.monotonic() - KEEP_S if oldest_s is None else oldest_s
            if self._issuer_document is None or self._issuer_document.read_s < oldest_s:
                if time.monotonic() - self._failed_s < FAILED_GAP_S:
                    raise OidcError(UNREACHABLE)
                try:
                    async with asyncio.timeout(self._request_limit_s):
                        self._issuer_document = await self._read_issuer()
                except (
                    httpx.HTTPError,
                    httpx.InvalidURL,
                    JoseError,
                    KeyError,
                    TimeoutError,
                    TypeError,
                    ValueError,
                ) as error:
                    self._failed_s = time.monotonic()
                    log.warning("the OIDC issuer cannot be asked: %r", error)
                    raise OidcError(UNREACHABLE) from error
            return self._issuer_document

    async def _read_issuer(self) -> _Issuer:
        async with self._client() as client:
            about = await _object(client.stream("GET", self._settings.issuer.rstrip("/") + DISCOVERY_PATH))
            if about["issuer"] != self._settings.issuer:
                raise ValueError(f"auth.oidc.issuer is {self._settings.issuer}, but it says {about['issuer']}")
            keys = KeySet.import_key_set(await _object(client.stream("GET", about["jwks_uri"])))
        authorization, token = httpx.URL(about["authorization_endpoint"]), httpx.URL(about["token_endpoint"])
        return _Issuer(authorization, token, keys, time.monotonic())

    def _client(self) -> httpx.AsyncClient:
        return httpx.AsyncClient(timeout=self._request_limit_s, headers={"accept": "application/json"})


class OidcUser(NamedTuple):
    """A user whom the settings allow to log in."""

    name: str
    role: Role  # of team roles, the highest
    teams: dict[str, Role]  # the role in each team, by the team's name or id as the settings have it


def allowed_user(settings: OidcSettings, claims: Mapping[str, Any]) -> OidcUser:
    """Return the user of these claims with their role. Raises OidcError if the settings do not allow the user.

    An address counts only if the issuer has verified it: otherwise anyone could claim it.
    """
    is_verified = claims.get("email_verified") in (True, "true")  # some issuers write it as text
    email = str(claims.get("email", "")).lower() if is_verified else ""
    name = email or f"sub:{claims['sub']}"
    found = claims.get(settings.groups_claim)
    groups = found if isinstance(found, list) else [found]
    if not settings.roles:
        if _is_meant(settings.allowed_emails, settings.allowed_groups, email, groups):
            return OidcUser(name, "admin", {})
    elif held := [rule for rule in settings.roles if _is_meant(rule.emails, rule.groups, email, groups)]:
        role = min((rule.role for rule in held), key=ROLES.index)
        rules = [rule for rule in held if rule.role in TEAM_ROLES] if role in TEAM_ROLES else []
        lowest_first = sorted(rules, key=lambda rule: -ROLES.index(rule.role))
        return OidcUser(name, role, {team: rule.role for rule in lowest_first for team in rule.teams})
    log.warning("auth.oidc allows neither the address nor a group of %s", name)
    raise OidcNotAllowed("You are not allowed to log in here.", name)


def _is_meant(emails: tuple[str, ...], allowed_groups: tuple[str, ...], email: str, groups: Sequence[object]) -> bool:
    addresses = {address.lower() for address in emails}
    is_named = bool(email) and (email in addresses or "@" + email.rpartition("@")[2] in addresses)
    return is_named or any(group in allowed_groups for group in groups)


async def _object(exchange: AbstractAsyncContextManager[httpx.Response]) -> Any:  # noqa: ANN401  # a dict, of JSON
    """Return the JSON object of an answer. Raises httpx.HTTPError and ValueError."""
    body = b""
    async with exchange as response:
        async for part in response.aiter_bytes():
            body += part
            if len(body) > MAX_DOCUMENT_BYTES:
                raise ValueError(f"{response.url} is larger than {MAX_DOCUMENT_BYTES} bytes")
    if not response.is_success:
        raise ValueError(f"{response.url} answered {response.status_code}: {body[:200]!r}")
    try:
        return msgspec.json.decode(body, type=dict[str, Any])
    except UNDECODABLE as error:
        raise ValueError(f"{response.url} answered no JSON object: {error}") from error
