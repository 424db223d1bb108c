"""Routes besides inference: browsers, probes, tools, and the OpenAPI document."""

import gzip
import json
import re
import zlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio
import zstandard

import gateway
from console.admin.views import audit_view, key_view, organisation_view, team_view
from console.admin.webhook_views import delivery_view, endpoint_view
from db.accounts.audit import AuditEntry
from db.accounts.keys import ApiKey
from db.accounts.principal import NO_POLICY
from db.accounts.teams import Organisation, Team
from gateway.api.errors import FAILURES, form_of_kind
from gateway.errors import InvalidParameter, Refused, RequestFailed
from gateway.http import openapi
from gateway.http.body import FREE_BYTES, MAX_PARTS
from gateway.http.openapi import SCHEMAS
from gateway.http.openapi_admin import ADMIN_CONTENT, ADMIN_SCHEMAS
from ledger.webhooks.deliveries import Delivery
from ledger.webhooks.endpoints import Endpoint
from tests.integration.gateway.conftest import MODEL, GatewayUnderTest, Share
from tests.integration.gateway.test_errors import error_of
from tests.waiting import HANGS_S

SOURCES = sorted(Path(str(gateway.__file__)).parent.rglob("*.py"))
CHAT = "/v1/chat/completions"
NO_MODEL = {"model": "no-such-model"}
ASKED = [{"role": "user", "content": "Hi"}]
JSON_BODIES: dict[str, dict[str, Any]] = {
    CHAT: {**NO_MODEL, "messages": ASKED},
    "/v1/completions": {**NO_MODEL, "prompt": "Hi"},
    "/v1/embeddings": {**NO_MODEL, "input": "Hi"},
    "/v1/score": {**NO_MODEL, "text_1": "Hi", "text_2": "Ho"},
    "/v1/rerank": {**NO_MODEL, "query": "Hi", "documents": ["Ho"]},
    "/v1/responses": {**NO_MODEL, "input": "Hi"},
    "/v1/messages": {**NO_MODEL, "messages": ASKED, "max_tokens": 1},
    "/v1/messages/count_tokens": {**NO_MODEL, "messages": ASKED},
    "/tokenize": {**NO_MODEL, "prompt": "Hi"},
    "/detokenize": {**NO_MODEL, "tokens": [1]},
    "/v1/batches": {"input_file_id": "file-none", "endpoint": CHAT, "completion_window": "24h"},
}


@pytest_asyncio.fixture(loop_scope="module")
async def running(share_gateway: Share) -> GatewayUnderTest:
    return await share_gateway(cors_origins=["https://app.example"], console={})


@pytest_asyncio.fixture(loop_scope="module")
async def http(running: GatewayUnderTest) -> AsyncIterator[httpx.AsyncClient]:
    headers = {"authorization": f"Bearer {running.key}"}
    async with httpx.AsyncClient(base_url=running.url, headers=headers, timeout=HANGS_S) as client:
        yield client


async def test_somebody_who_knows_only_the_address(http: httpx.AsyncClient) -> None:
    found = (await http.get("/")).json()
    for path in ("models", "documentation", "openapi", "health"):
        assert (await http.get(found[path])).status_code == 200
    assert (await http.get("/version")).json() == {"version": found["version"]}
    page = await http.get("/docs")
    assert "script-src 'self';" in page.headers["content-security-policy"]
    files = re.findall(r'(?:src|href)="(docs/[^"]+)"', page.text)
    assert len(files) == 3
    for file in files:
        assert (await http.get(f"/{file}")).headers["cache-control"] == "public, max-age=31536000, immutable"
        older = re.sub("static/[^/]+", "static/older", file)
        assert (await http.get(f"/{older}")).headers["cache-control"] == "no-store"
    assert (await http.get("/docs/static/x/page.html")).status_code == 404
    assert (await http.get("/health")).json() == (await http.get("/readyz")).json()


async def test_get_routes_answer_head(http: httpx.AsyncClient) -> None:
    for path in ("/", "/v1/models", "/livez", "/openapi.json", f"/v1/models/{MODEL}", "/version", "/login"):
        head, whole = await http.head(path), await http.get(path)
        assert (head.status_code, head.content) == (200, b"")
        assert head.headers["content-type"] == whole.headers["content-type"]
        assert head.headers["content-length"] == str(len(whole.content))
    assert (await http.head("/nothing")).status_code == 404
    refused = await http.head(CHAT)
    assert (refused.status_code, refused.headers["allow"]) == (405, "POST")
    refused = await http.post("/v1/models")
    assert (refused.status_code, refused.headers["allow"]) == (405, "GET")


async def test_unsupported_encodings_are_refused_with_the_reason(http: httpx.AsyncClient) -> None:
    for path in (CHAT, "/v1/embeddings", "/tokenize"):
        answer = await http.post(path, content=b"{}", headers={"content-encoding": "br"})
        assert error_of(answer) == (415, "unsupported_content_encoding", None)
        assert "uncompressed" in answer.json()["error"]["message"]


@pytest.mark.parametrize("packed", [gzip.compress, zstandard.compress], ids=["gzip", "zstd"])
@pytest.mark.parametrize("path", JSON_BODIES)
async def test_compressed_bodies_are_accepted(
    http: httpx.AsyncClient, path: str, packed: Callable[[bytes], bytes]
) -> None:
    """Compressed bodies work like uncompressed ones; invalid encodings are a 400."""
    body = json.dumps(JSON_BODIES[path]).encode()
    coding = {"content-encoding": packed.__module__.replace("zstandard", "zstd").split(".")[0]}
    plain, answer = await http.post(path, content=body), await http.post(path, content=packed(body), headers=coding)
    assert (answer.status_code, answer.json()["error"]) == (plain.status_code, plain.json()["error"])
    assert answer.status_code in {400, 404}
    cut = await http.post(path, content=packed(body)[:-3], headers=coding)
    assert cut.status_code == 400
    assert f"not valid {coding['content-encoding']}" in cut.text


@pytest.mark.parametrize("is_chunked", [False, True], ids=["content-length", "chunked"])
@pytest.mark.parametrize("path", JSON_BODIES)
async def test_compressed_bodies_that_are_refused(http: httpx.AsyncClient, path: str, *, is_chunked: bool) -> None:
    """Decompression bombs, many members, an unknown encoding, and a doubly compressed body."""
    gzipped = gzip.compress(json.dumps(JSON_BODIES[path]).encode())
    for coding, body, status, code in (
        ("gzip", gzip.compress(bytes(3 * FREE_BYTES)), 413, "request_too_large"),
        ("zstd", zstandard.compress(bytes(3 * FREE_BYTES)), 413, "request_too_large"),
        ("gzip", gzip.compress(b"") * (MAX_PARTS + 1), 400, "invalid_value"),
        ("zstd", gzipped, 400, "invalid_value"),
        ("gzip", zstandard.compress(b"{}"), 400, "invalid_value"),
        ("gzip", gzip.compress(gzipped), 400, None),
        ("gzip, gzip", gzip.compress(gzipped), 415, "unsupported_content_encoding"),
        ("deflate", zlib.compress(b"{}"), 415, "unsupported_content_encoding"),
        ("compress", b"{}", 415, "unsupported_content_encoding"),
        ("*", b"{}", 415, "unsupported_content_encoding"),
    ):
        content = pieces(body) if is_chunked else body
        answer = await http.post(path, content=content, headers={"content-encoding": coding})
        error = answer.json()["error"]
        assert answer.status_code == status, (coding, answer.text)
        assert code is None or "code" not in error or error["code"] == code, (coding, error)


async def pieces(body: bytes) -> AsyncIterator[bytes]:
    half = len(body) // 2
    yield body[:half]
    yield body[half:]


@pytest.mark.parametrize("path", ["/v1/files", "/v1/messages/batches"])
async def test_uploads_are_not_compressed(http: httpx.AsyncClient, path: str) -> None:
    """Uploads can be as large as a disk, so they are not decompressed."""
    answer = await http.post(path, content=gzip.compress(b"{}"), headers={"content-encoding": "gzip"})
    assert answer.status_code == 415
    assert "uncompressed" in answer.text


async def test_pages_of_other_sites(http: httpx.AsyncClient, share_gateway: Share) -> None:
    asks = {
        "origin": "https://app.example",
        "access-control-request-method": "POST",
        "access-control-request-headers": "authorization,content-type,x-stainless-lang",
    }
    allowed = await http.options(CHAT, headers=asks)
    assert allowed.status_code == 200
    assert allowed.headers["access-control-allow-origin"] == "https://app.example"
    assert "POST" in allowed.headers["access-control-allow-methods"]
    assert "authorization" in allowed.headers["access-control-allow-headers"]
    assert "access-control-allow-credentials" not in allowed.headers
    refused = await http.options(CHAT, headers={**asks, "origin": "https://evil.example"})
    assert "access-control-allow-origin" not in refused.headers
    for path in ("/v1/models", "/nothing"):
        answer = await http.get(path, headers={"origin": "https://app.example"})
        assert answer.headers["access-control-allow-origin"] == "https://app.example"
        exposed = answer.headers["access-control-expose-headers"]
        assert {"x-request-id", "x-ratelimit-remaining-tokens", "retry-after"} <= set(exposed.split(", "))
    without = await share_gateway()
    async with httpx.AsyncClient(base_url=without.url) as other:
        assert (await other.options(CHAT, headers=asks)).status_code == 405
        answer = await other.get("/livez", headers={"origin": "https://app.example"})
        assert "access-control-allow-origin" not in answer.headers


# --- what the description promises ------------------------------------------------------------------------------------


def kinds(base: type[Refused] = Refused) -> set[type[Refused]]:
    return {base}.union(*(kinds(kind) for kind in base.__subclasses__() if kind.__module__.startswith("gateway.")))


def test_every_error_is_described_somewhere() -> None:
    described = {
        (form_of_kind(kind).status, kind.code)
        for kind in (*openapi.OF_JOBS, *openapi.OF_CHANGES, *openapi.OF_FILES, *openapi.NOWHERE)
    }
    assert [kind for kind in kinds() if (form_of_kind(kind).status, kind.code) not in described] == []


def test_every_code_of_an_invalid_parameter_is_listed() -> None:
    sources = [path.read_text() for path in SOURCES]
    written = {code for source in sources for code in re.findall(r'code="([a-z_]+)"', source)}
    assert written == set(InvalidParameter.other_codes)


def test_answers_and_bodies_have_names_of_their_own() -> None:
    of_bodies = {
        name for body in openapi.BODIES for name in (body.__name__, *body.model_json_schema().get("$defs", {}))
    }
    assert of_bodies & (SCHEMAS.keys() | ADMIN_SCHEMAS.keys()) == set()


async def test_routes_are_grouped_with_generation_first(http: httpx.AsyncClient) -> None:
    document = (await http.get("/openapi.json")).json()
    assert next(iter(document["paths"])) == CHAT
    used = {tag for operations in document["paths"].values() for one in operations.values() for tag in one["tags"]}
    assert [group["name"] for group in document["tags"]] == list(openapi.TAGS)
    assert used == set(openapi.TAGS)
    assert document["tags"][0]["name"] == "generation"


async def test_every_answer_of_the_admin_api_has_a_schema(http: httpx.AsyncClient) -> None:
    document = (await http.get("/openapi.json")).json()
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            if path.startswith("/admin/"):
                success = next(
                    operation["responses"][code] for code in ("200", "201") if code in operation["responses"]
                )
                assert success["content"]["application/json"]["schema"], (method, path)
    for path, method in ADMIN_CONTENT:
        assert method in document["paths"][path], (method, path)


def test_the_schemas_of_the_admin_api_name_every_field() -> None:
    organisation, team = Organisation("o", "o", 0), Team("t", "t", "o", "o", 0, NO_POLICY)
    key = ApiKey("k", "k", "abcd", 0, None, "t", "t", ("inference",), None, None, None, NO_POLICY)
    entry = AuditEntry("a", 0, "system", "key.create", "k", None, None)
    endpoint = Endpoint("e", "t", "t", "https://x", (), None, None, None, 0)
    delivery = Delivery("ev", "e", "x", 0, None, "", 0, None, None, None)
    views = {
        "Organisation": organisation_view(organisation),
        "Team": team_view(team),
        "Key": key_view(key, "sk"),
        "AuditEntry": audit_view(entry),
        "Webhook": endpoint_view(endpoint, "whsec"),
        "WebhookDelivery": delivery_view(delivery),
    }
    for name, view in views.items():
        assert sorted(ADMIN_SCHEMAS[name]["properties"]) == sorted(view), name
        assert set(ADMIN_SCHEMAS[name]["required"]) >= view.keys() - {"token", "secret"}


async def test_every_status_is_described_with_its_codes(http: httpx.AsyncClient) -> None:
    paths = (await http.get("/openapi.json")).json()["paths"]
    assert len(paths) > 20
    chat = paths[CHAT]["post"]["responses"]
    for code, failure in FAILURES.items():
        assert f"`{code}`" in chat[str(failure.status)]["description"]
    for kind in set(openapi.OF_JOBS) - {RequestFailed}:
        assert f"`{kind.code}`" in chat[str(form_of_kind(kind).status)]["description"] or kind.code is None
    for path, operations in paths.items():
        for operation in operations.values():
            assert {"400", "405", "408", "429", "431", "500", "503"} <= set(operation["responses"]), path
            assert not {"422", "default"} & set(operation["responses"])
    assert {"401", "403", "404", "409", "413", "415"} <= set(paths["/admin/v1/keys"]["post"]["responses"])


async def test_answers_match_their_description(http: httpx.AsyncClient) -> None:
    paths = (await http.get("/openapi.json")).json()["paths"]
    body: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}]}
    asked: list[tuple[str, str, str, dict[str, Any]]] = [
        ("GET", "/v1/models", "/v1/models", {"headers": {"authorization": "Bearer sk-no"}}),
        ("GET", "/v1/models/{name}", "/v1/models/no", {}),
        ("POST", CHAT, CHAT, {"content": b"{"}),
        ("POST", CHAT, CHAT, {"json": {**body, "n": 0}}),
        ("POST", CHAT, CHAT, {"json": {**body, "do_not_queue": True}}),
        ("POST", "/rerank", "/rerank", {"json": {}}),
        ("POST", "/tokenize", "/tokenize", {"content": b"x", "headers": {"content-encoding": "br"}}),
        ("GET", "/metrics", "/metrics", {}),
        ("GET", "/admin/v1/audit", "/admin/v1/audit?limit=0", {}),
        ("GET", "/livez", "/livez?x=%00", {}),
    ]
    for method, route, path, fields in asked:
        answer = await http.request(method, path, **fields)
        assert answer.status_code >= 400
        described = paths[route][method.lower()]["responses"][str(answer.status_code)]["description"]
        code = answer.json()["error"]["code"]
        assert code is None or f"`{code}`" in described, (route, answer.text)
