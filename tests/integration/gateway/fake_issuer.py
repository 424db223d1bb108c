"""An OpenID Connect issuer of a test's own: real HTTP, really signed tokens, and whatever lie a test wants told."""

import asyncio
import base64
import contextlib
import hashlib
import time
from collections.abc import AsyncIterator, Callable
from typing import Any
from urllib.parse import parse_qs, urlsplit

import uvicorn
from joserfc import jwt
from joserfc.jwk import ECKey, KeySet, RSAKey
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from tests.waiting import HANGS_S

CLIENT_ID = "spillway"
CLIENT_SECRET = "of the client"
KEY_BITS = 2048

Sign = Callable[[dict[str, Any]], str]


class FakeIssuer:
    """Hands out codes to ``approve`` and ID tokens for them; ``claims`` and ``sign`` are the test's to change."""

    def __init__(self) -> None:
        self.url = ""
        self.is_client_public = False
        self.key = RSAKey.generate_key(KEY_BITS, {"kid": "first"})
        self.published: list[RSAKey | ECKey] = [self.key]
        self.claims: dict[str, Any] = {"sub": "u1", "email": "Alice@Example.com", "email_verified": True}
        self.sign: Sign = self.sign_rightly
        self.says_of_itself: dict[str, Any] = {}
        self._codes: dict[str, dict[str, str]] = {}

    def sign_rightly(self, claims: dict[str, Any]) -> str:
        return jwt.encode({"alg": "RS256", "kid": self.key.kid}, claims, self.key)

    def approve(self, authorization_url: str, **rest: str) -> dict[str, str]:
        """Play the issuer's page after the person's yes; return the query of the way back."""
        asked = {name: values[0] for name, values in parse_qs(urlsplit(authorization_url).query).items()}
        assert asked["response_type"] == "code"
        assert asked["code_challenge_method"] == "S256"
        assert set(asked["scope"].split()) == {"openid", "email", "profile"}
        code = f"code-{len(self._codes)}"
        self._codes[code] = asked
        return {"code": code, "state": asked["state"], "iss": self.url, **rest}

    async def _discovery(self, request: Request) -> JSONResponse:
        about = {
            "issuer": self.url,
            "authorization_endpoint": f"{self.url}/authorize",
            "token_endpoint": f"{self.url}/token",
            "jwks_uri": f"{self.url}/keys",
        }
        return JSONResponse({**about, **self.says_of_itself})

    async def _keys(self, request: Request) -> JSONResponse:
        return JSONResponse(KeySet(list(self.published)).as_dict(private=False))

    async def _token(self, request: Request) -> JSONResponse:
        form = {name: values[0] for name, values in parse_qs((await request.body()).decode()).items()}
        asked = self._codes.pop(form.get("code", ""), None)
        challenge = base64.urlsafe_b64encode(hashlib.sha256(form.get("code_verifier", "").encode()).digest())
        if (
            asked is None
            or not self._is_client(request.headers.get("authorization"), form.get("client_id"))
            or form["redirect_uri"] != asked["redirect_uri"]
            or challenge.decode().rstrip("=") != asked["code_challenge"]
        ):
            return JSONResponse({"error": "invalid_grant"}, 400)
        now_s = int(time.time())
        usual = {"iss": self.url, "aud": CLIENT_ID, "nonce": asked["nonce"], "iat": now_s, "exp": now_s + 300}
        claims = {name: value for name, value in {**usual, **self.claims}.items() if value is not None}
        return JSONResponse({"access_token": "x", "token_type": "Bearer", "id_token": self.sign(claims)})

    def _is_client(self, authorization: str | None, named: str | None) -> bool:
        if self.is_client_public:
            return (authorization, named) == (None, CLIENT_ID)
        basic = base64.b64encode(f"{CLIENT_ID}:{CLIENT_SECRET}".encode()).decode()
        return (authorization, named) == (f"Basic {basic}", None)

    @contextlib.asynccontextmanager
    async def serve(self) -> AsyncIterator["FakeIssuer"]:
        routes = [
            Route("/.well-known/openid-configuration", self._discovery),
            Route("/keys", self._keys),
            Route("/token", self._token, methods=["POST"]),
        ]
        config = uvicorn.Config(Starlette(routes=routes), port=0, log_config=None, lifespan="off")
        server = uvicorn.Server(config)
        server.install_signal_handlers = lambda: None  # type: ignore[attr-defined]
        serving = asyncio.create_task(server._serve())
        async with asyncio.timeout(HANGS_S):
            while not server.started:
                await asyncio.sleep(0.01)
        self.url = f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
        try:
            yield self
        finally:
            server.should_exit = True
            await serving
