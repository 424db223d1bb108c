"""Logging in by an OpenID Connect issuer, and each way in which its word is not to be believed."""

import asyncio
import base64
import contextlib
import hmac
import json
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any
from urllib.parse import parse_qs, urlsplit

import httpx
import pytest
from joserfc import jwt
from joserfc.jwk import RSAKey
from pydantic import ValidationError

from console.login.oidc import UNREACHABLE, OidcLogin, allowed_user
from console.settings import OidcSettings
from db.accounts.audit import AuditFilter, list_changes
from db.accounts.errors import OidcError, OidcNotAllowed
from db.accounts.teams import create_team
from db.engine import create_engine
from tests.integration.gateway.conftest import Start
from tests.integration.gateway.fake_issuer import CLIENT_ID, CLIENT_SECRET, KEY_BITS, FakeIssuer
from tests.waiting import HANGS_S, until

CALLBACK = "http://spillway.example/login/oidc/callback"


@pytest.fixture
async def issuer() -> AsyncIterator[FakeIssuer]:
    async with FakeIssuer().serve() as issuer:
        yield issuer


Answer = Callable[[asyncio.StreamWriter], Awaitable[None]]


@contextlib.asynccontextmanager
async def server_of(answer: Answer) -> AsyncIterator[str]:
    """A server whose every connection is answered like this; yields its URL."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.closing(writer), contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            head = await reader.readuntil(b"\r\n\r\n")  # all of it is read: otherwise closing is a reset
            if length := re.search(rb"content-length: (\d+)", head, re.IGNORECASE):
                await reader.readexactly(int(length[1]))
            await answer(writer)
            await writer.drain()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()


def says(status: str, body: bytes) -> Answer:
    async def answer(writer: asyncio.StreamWriter) -> None:
        writer.write(f"HTTP/1.1 {status}\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n".encode() + body)

    return answer


def repeats(part: bytes) -> Answer:
    """Never ends its answer."""

    async def answer(writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 1000000000\r\n\r\n")
        while True:
            writer.write(part)
            await writer.drain()
            await asyncio.sleep(0.01)

    return answer


async def hangs_up(_writer: asyncio.StreamWriter) -> None:
    pass


def settings_for(issuer: FakeIssuer) -> OidcSettings:
    allowed = {"allowed_emails": ("alice@example.com",)}
    return OidcSettings.model_validate(
        {"issuer": issuer.url, "client_id": CLIENT_ID, "client_secret": CLIENT_SECRET, **allowed}
    )


async def log_in(login: OidcLogin, issuer: FakeIssuer, **answer: str) -> str:
    url, asked = await login.authorization_request(CALLBACK)
    return (await login.user(asked, CALLBACK, issuer.approve(url, **answer))).name


async def test_a_browser_is_sent_there_and_back_and_is_logged_in(start_gateway: Start, issuer: FakeIssuer) -> None:
    gateway = await start_gateway(with_card=False, console={"oidc": settings_for(issuer)})
    async with httpx.AsyncClient(base_url=gateway.url, timeout=HANGS_S) as browser:
        page = await browser.get("/login", params={"next": "/dashboard/cost"})
        assert 'href="/login/oidc?next=%2Fdashboard%2Fcost"' in page.text
        sent = await browser.get("/login/oidc", params={"next": "/dashboard/cost"})
        assert sent.headers["location"].startswith(f"{issuer.url}/authorize?")
        asked = parse_qs(urlsplit(sent.headers["location"]).query)
        assert asked["redirect_uri"] == [f"{gateway.url}/login/oidc/callback"]
        back = issuer.approve(sent.headers["location"])
        answer = await browser.get("/login/oidc/callback", params=back)
        assert (answer.status_code, answer.headers["location"]) == (303, "/dashboard/cost")
        made = await browser.post("/admin/v1/teams", json={"name": "a"})
        [entry] = (await browser.get("/admin/v1/audit", params={"subject": made.json()["id"]})).json()["data"]
        assert entry["actor"] == "user:alice@example.com"
        # The same answer again, and one that another browser was sent away for.
        again = await browser.get("/login/oidc/callback", params=back)
        assert again.status_code == 401
        assert "expired or was started in another browser" in again.text
        await browser.get("/login/oidc")
        stranger = await browser.get("/login/oidc/callback", params=issuer.approve(sent.headers["location"]))
        assert stranger.status_code == 401
        assert "belongs to another login" in stranger.text


async def test_groups_of_the_issuer_are_roles_in_teams(
    start_gateway: Start, sqlite_url: str, issuer: FakeIssuer
) -> None:
    engine = create_engine(sqlite_url)
    search = (await create_team(engine, "search", "cli:test")).team_id
    await create_team(engine, "support", "cli:test")
    rules = [
        {"role": "member", "groups": ["search-dev"], "teams": ["search", "not made yet"]},
        {"role": "viewer", "groups": ["finance"]},
        {"role": "manager", "groups": ["lost"], "teams": ["not made yet"]},
    ]
    settings = settings_for(issuer).model_dump() | {"allowed_emails": (), "allowed_groups": (), "roles": rules}
    gateway = await start_gateway(with_card=False, console={"oidc": settings})
    async with httpx.AsyncClient(base_url=gateway.url, timeout=HANGS_S) as browser:

        async def log_in_as(*groups: str) -> httpx.Response:
            issuer.claims["groups"] = list(groups)
            sent = await browser.get("/login/oidc")
            return await browser.get("/login/oidc/callback", params=issuer.approve(sent.headers["location"]))

        assert (await log_in_as("search-dev")).status_code == 303
        assert [team["id"] for team in (await browser.get("/admin/v1/teams")).json()["data"]] == [search]
        assert (await browser.get("/dashboard/fleet")).status_code == 403
        assert (await log_in_as("finance")).status_code == 303
        assert len((await browser.get("/admin/v1/teams")).json()["data"]) == 3
        for groups, said in (
            (["lost"], "None of your teams exists here: not made yet"),
            (["x"], "not allowed to log"),
        ):
            refused = await log_in_as(*groups)
            assert (refused.status_code, said in refused.text) == (401, True)
    failed = await list_changes(engine, AuditFilter(actor="user:alice@example.com"), 10)
    assert [entry.action for entry in failed if entry.action != "login"] == ["login.failed"] * 2
    await engine.dispose()


def by_hand(header: dict[str, str], claims: dict[str, Any], secret: bytes | None) -> str:
    """A token as no library would make it: unsigned, or signed (HS256) with what is no secret."""

    def part(data: bytes) -> str:
        return base64.urlsafe_b64encode(data).decode().rstrip("=")

    signed = f"{part(json.dumps(header).encode())}.{part(json.dumps(claims).encode())}"
    signature = b"" if secret is None else hmac.digest(secret, signed.encode(), "sha256")
    return f"{signed}.{part(signature)}"


@pytest.mark.parametrize(
    "lie",
    [
        {"iss": "https://other.example"},
        {"iss": None},
        {"aud": "another-client"},
        {"aud": [CLIENT_ID, "another-client"]},  # without azp
        {"aud": None},
        {"nonce": "of another login"},
        {"nonce": None},
        {"exp": 1_000_000_000},
        {"exp": None},
        {"iat": 10_000_000_000},  # in 2286
        {"sub": None},
    ],
    ids=str,
)
async def test_a_token_that_is_not_for_this_login_is_refused(issuer: FakeIssuer, lie: dict[str, Any]) -> None:
    login = OidcLogin(settings_for(issuer))
    issuer.claims.update(lie)
    with pytest.raises(OidcError):
        await log_in(login, issuer)
    for name in lie:
        issuer.claims.pop(name)
    issuer.claims["sub"] = "u1"
    assert await log_in(login, issuer) == "alice@example.com"


async def test_a_token_that_the_issuer_has_not_signed_is_refused(issuer: FakeIssuer) -> None:
    login = OidcLogin(settings_for(issuer))
    other = RSAKey.generate_key(KEY_BITS)
    public, symmetric = issuer.key.as_pem(private=False), {"alg": "HS256", "kid": "first"}
    lies = {
        "unsigned": lambda claims: by_hand({"alg": "none"}, claims, None),
        "another key": lambda claims: jwt.encode({"alg": "RS256", "kid": "first"}, claims, other),
        "unknown key": lambda claims: jwt.encode({"alg": "RS256", "kid": "other"}, claims, other),
        "public key as a secret": lambda claims: by_hand(symmetric, claims, public),
        "client's secret": lambda claims: by_hand({"alg": "HS256"}, claims, CLIENT_SECRET.encode()),
        "changed": lambda claims: issuer.sign_rightly(claims)[:-8] + "AAAAAAAA",
        "no token": lambda _claims: "x",
    }
    for lie in lies.values():
        issuer.sign = lie
        with pytest.raises(OidcError, match="ID token is invalid"):
            await log_in(login, issuer)
    issuer.sign = issuer.sign_rightly
    assert await log_in(login, issuer) == "alice@example.com"


async def test_another_answer_or_browser_gets_nowhere(issuer: FakeIssuer) -> None:
    login = OidcLogin(settings_for(issuer))
    for answer, said in (
        ({"state": "of another"}, "another login"),
        ({"iss": "https://other.example"}, "another issuer"),
        ({"code": "made up"}, "did not confirm"),
    ):
        with pytest.raises(OidcError, match=said):
            await log_in(login, issuer, **answer)
    url, _ = await login.authorization_request(CALLBACK)
    _, asked = await login.authorization_request(CALLBACK)
    stolen = {**issuer.approve(url), "state": asked.state}  # its verifier is in the other browser
    with pytest.raises(OidcError, match="did not confirm"):
        await login.user(asked, CALLBACK, stolen)
    with pytest.raises(OidcError, match="refused"):
        await login.user(asked, CALLBACK, {"state": asked.state, "error": "access_denied"})


async def test_a_public_client_names_itself_and_sends_no_secret(issuer: FakeIssuer) -> None:
    issuer.is_client_public = True
    login = OidcLogin(settings_for(issuer).model_copy(update={"client_secret": None}))
    assert await log_in(login, issuer) == "alice@example.com"


async def test_new_keys_of_the_issuer_are_found(issuer: FakeIssuer) -> None:
    login = OidcLogin(settings_for(issuer))
    assert await log_in(login, issuer) == "alice@example.com"
    issuer.key = RSAKey.generate_key(KEY_BITS, {"kid": "second"})
    issuer.published.append(issuer.key)
    with pytest.raises(OidcError):  # it has asked just now, and does not ask for each token that comes
        await log_in(login, issuer)
    login.new_keys_gap_s = 0.0
    assert await log_in(login, issuer) == "alice@example.com"


async def test_an_issuer_that_is_another_or_away_is_not_asked(issuer: FakeIssuer) -> None:
    issuer.says_of_itself = {"issuer": "https://other.example"}
    with pytest.raises(OidcError, match="cannot be reached"):
        await OidcLogin(settings_for(issuer)).authorization_request(CALLBACK)
    gone = settings_for(issuer).model_copy(update={"issuer": "http://127.0.0.1:1"})
    with pytest.raises(OidcError, match="cannot be reached"):
        await OidcLogin(gone).authorization_request(CALLBACK)


async def test_an_issuer_that_never_ends_its_answer_is_given_up_for_all_at_once(issuer: FakeIssuer) -> None:
    """All who wanted to log in waited for their turn to ask it, without a limit of the whole."""
    connections = 0

    async def drip(writer: asyncio.StreamWriter) -> None:
        nonlocal connections
        connections += 1
        await repeats(b" ")(writer)

    async with server_of(drip) as url, asyncio.timeout(HANGS_S):
        settings = settings_for(issuer).model_copy(update={"issuer": url})
        login = OidcLogin(settings, request_limit_s=0.5)
        answers = await asyncio.gather(
            *(login.authorization_request(CALLBACK) for _ in range(50)), return_exceptions=True
        )
    assert {str(answer) for answer in answers} == {UNREACHABLE}
    assert connections == 1


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (hangs_up, "disconnected"),
        (says("200 OK", b"no JSON"), "no JSON object"),
        (says("200 OK", b'["x"]'), "no JSON object"),
        (says("500 Oh", b""), "500"),
        (says("400 Bad Request", b'{"error": "invalid_client"}'), "invalid_client"),
        (repeats(b" " * 100_000), "larger than"),
        (repeats(b" "), "TimeoutError"),
    ],
    ids=lambda given: given if isinstance(given, str) else "",
)
async def test_a_token_endpoint_that_gives_no_token_logs_nobody_in(
    issuer: FakeIssuer, answer: Answer, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with server_of(answer) as url, asyncio.timeout(HANGS_S):
        issuer.says_of_itself = {"token_endpoint": url}
        login = OidcLogin(settings_for(issuer), request_limit_s=1.0 if reason == "TimeoutError" else HANGS_S)

        async def knows_issuer() -> bool:  # which on a busy machine takes longer than the shorter limit
            with contextlib.suppress(OidcError):
                return bool(await login.authorization_request(CALLBACK))
            return False

        await until(knows_issuer)
        with pytest.raises(OidcError, match="did not confirm"):
            await log_in(login, issuer)
    assert reason in caplog.text


def test_only_those_are_let_in_who_are_allowed() -> None:
    def of(claims: dict[str, Any], **allowed: Any) -> str:
        settings = OidcSettings(issuer="https://id.example", client_id="c", **allowed)
        return allowed_user(settings, {"sub": "u1", **claims}).name

    alice = {"email": "Alice@Example.com", "email_verified": True}
    assert of(alice, allowed_emails=("alice@example.com",)) == "alice@example.com"
    assert of(alice, allowed_emails=("@example.com",)) == "alice@example.com"
    assert of({"groups": ["ops", "dev"]}, allowed_groups=("ops",)) == "sub:u1"
    assert of({"roles": "ops"}, allowed_groups=("ops",), groups_claim="roles") == "sub:u1"
    for claims, allowed in (
        ({**alice, "email_verified": False}, {"allowed_emails": ("alice@example.com",)}),
        ({"email": "alice@example.com"}, {"allowed_emails": ("alice@example.com",)}),
        ({"email": "alice@evil-example.com", "email_verified": True}, {"allowed_emails": ("@example.com",)}),
        ({"email": "alice@example.com.evil", "email_verified": True}, {"allowed_emails": ("@example.com",)}),
        (alice, {"allowed_groups": ("ops",)}),
        ({"groups": ["dev", ["ops"], None]}, {"allowed_groups": ("ops",)}),
    ):
        with pytest.raises(OidcError, match="not allowed to log in"):
            of(claims, **allowed)


def test_the_role_that_may_do_most_counts() -> None:
    rules = [
        {"role": "viewer", "emails": ["@example.com"]},
        {"role": "member", "groups": ["dev"], "teams": ["a", "b"]},
        {"role": "manager", "groups": ["lead"], "teams": ["b"]},
        {"role": "owner", "emails": ["root@example.com"]},
    ]
    settings = OidcSettings.model_validate({"issuer": "https://id.example", "client_id": "c", "roles": rules})

    def of(email: str, *groups: str) -> tuple[str, dict[str, str]]:
        claims = {"sub": "u1", "email": email, "email_verified": True, "groups": list(groups)}
        user = allowed_user(settings, claims)
        return user.role, dict(user.teams)

    assert of("ann@example.com") == ("viewer", {})
    assert of("ann@example.com", "dev") == ("member", {"a": "member", "b": "member"})
    assert of("ann@example.com", "dev", "lead") == ("manager", {"a": "member", "b": "manager"})
    assert of("root@example.com", "dev") == ("owner", {})
    with pytest.raises(OidcNotAllowed):
        of("ann@elsewhere.example")


@pytest.mark.parametrize(
    ("rule", "said"),
    [
        ({"role": "admin"}, "groups or emails is required"),
        ({"role": "member", "groups": ["g"]}, "teams is required"),
        ({"role": "viewer", "groups": ["g"], "teams": ["a"]}, "holds for the whole installation"),
        ({"role": "chief", "groups": ["g"]}, "owner"),
        ({"role": "admin", "emails": ["ann"]}, "is not an email address"),
    ],
)
def test_a_rule_says_who_has_the_role_and_where(rule: dict[str, Any], said: str) -> None:
    with pytest.raises(ValidationError, match=said):
        OidcSettings.model_validate({"issuer": "https://id.example", "client_id": "c", "roles": [rule]})


def test_rules_and_lists_are_not_mixed() -> None:
    both = {"allowed_groups": ["g"], "roles": [{"role": "admin", "groups": ["g"]}]}
    with pytest.raises(ValidationError, match="move them into roles"):
        OidcSettings.model_validate({"issuer": "https://id.example", "client_id": "c", **both})


@pytest.mark.parametrize(
    ("change", "said"), [({"issuer": "http://id.example"}, "https"), ({"allowed_emails": ()}, "no user can log in")]
)
def test_settings_that_let_anybody_or_nobody_in_are_refused(change: dict[str, Any], said: str) -> None:
    good = {"issuer": "https://id.example", "client_id": "c", "allowed_emails": ("a@b.example",)}
    assert OidcSettings.model_validate(good).client_id == "c"
    with pytest.raises(ValidationError, match=said):
        OidcSettings.model_validate({**good, **change})
