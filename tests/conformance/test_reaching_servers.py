"""The connection to a server: its address, certificates, headers, a proxy, and the credentials check at start."""

import asyncio
import contextlib
import gc
import json
import ssl
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from pydantic import TypeAdapter, ValidationError

from pool_worker import engines
from pool_worker.certificates import authorities
from pool_worker.engines.base import AnyEngine, EngineDiedError
from pool_worker.engines.chat import ChatRequest
from pool_worker.engines.chat_server import ChatServerEngine
from pool_worker.engines.server_client import root_of, secrets_of
from pool_worker.settings import EngineSettings, OpenAIChatSettings
from protocol.generation import SamplingParams
from protocol.job import Chat, Turn
from tests.certificates import certified, private_bytes
from tests.conformance.test_chat_engines import Driver

# A client whose TLS handshake fails leaves its socket to the garbage collector: anyio does not close it.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")

SETTINGS: TypeAdapter[Any] = TypeAdapter(EngineSettings)
HOST = "127.0.0.1"


@dataclass
class Server:
    """Answers a GET with a model, and a POST with a status; records requests. ``page``: made from its head."""

    status: int = 400
    page: Callable[[str], str] = lambda _head: "no"
    port: int = 0
    heads: list[str] = field(default_factory=list)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError, ssl.SSLError):
            asked = (await reader.readuntil(b"\r\n\r\n")).decode()
            self.heads.append(asked.lower())
            is_asked_for_facts = self.heads[-1].startswith("get")
            status, body = (
                (200, FACTS) if is_asked_for_facts and self.status == 400 else (self.status, self.page(asked))
            )
            head = f"HTTP/1.1 {status} X\r\ncontent-length: {len(body)}\r\nconnection: close\r\n\r\n"
            writer.write((head + body).encode())
            await writer.drain()
        writer.close()
        with contextlib.suppress(ConnectionError, ssl.SSLError, TimeoutError):
            await writer.wait_closed()

    @property
    def paths(self) -> list[str]:
        return [head.split(" ")[1] for head in self.heads]


FACTS = '{"data": [{"id": "m", "max_model_len": 100}]}'


@contextlib.asynccontextmanager
async def serving(context: ssl.SSLContext | None = None) -> AsyncIterator[Server]:
    server = Server()
    listening = await asyncio.start_server(server.serve, HOST, 0, ssl=context)
    async with listening:
        server.port = listening.sockets[0].getsockname()[1]
        yield server


@contextlib.asynccontextmanager
async def started(engine: AnyEngine) -> AsyncIterator[AnyEngine]:
    try:
        await engine.start()
        yield engine
    finally:
        await engine.stop()


def chat(url: str, **more: Any) -> AnyEngine:
    return engines.create(OpenAIChatSettings(kind="openai_chat", profile="openai", url=url, model="m", **more))


@pytest.fixture(autouse=True)
def fresh_authorities() -> None:
    authorities.cache_clear()


@pytest.fixture(scope="module", autouse=True)
def no_sockets_left() -> Iterator[None]:
    yield
    gc.collect()


# --- addresses ------------------------------------------------------------------------------------------------------

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


@pytest.mark.parametrize(
    ("url", "paths", "root"),
    [
        ("http://h:1", (CHAT,), "http://h:1"),
        ("http://h:1/", (CHAT,), "http://h:1"),
        ("http://h:1/v1", (CHAT,), "http://h:1"),
        ("http://h:1/v1/", (CHAT,), "http://h:1"),
        ("http://h:1/v1/chat/completions", (CHAT,), "http://h:1"),
        ("http://h:1/team/llm/v1", (CHAT,), "http://h:1/team/llm"),
        ("http://h:1/team/llm/", (CHAT,), "http://h:1/team/llm"),
        ("http://[::1]:8000/v1", (CHAT,), "http://[::1]:8000"),
        ("https://api.groq.com/openai/v1", ("/openai/v1/chat/completions",), "https://api.groq.com"),
        ("https://openrouter.ai/api/v1", ("/api/v1/chat/completions",), "https://openrouter.ai"),
        ("https://openrouter.ai/api", ("/api/v1/chat/completions",), "https://openrouter.ai"),
        ("https://g.com/v1beta/openai/", ("/v1beta/openai/chat/completions",), "https://g.com"),
        ("https://api.anthropic.com/v1", ("/v1/messages",), "https://api.anthropic.com"),
        ("https://a.com/openai/deployments/m", ("/openai/deployments/m/chat/completions?v=1",), "https://a.com"),
        ("https://api.deepseek.com/v1", ("/chat/completions",), "https://api.deepseek.com/v1"),
        ("http://h:11434/v1", ("/api/generate", CHAT, COMPLETIONS), "http://h:11434"),
        ("http://h:11434/api", ("/api/generate", CHAT, COMPLETIONS), "http://h:11434"),
        ("http://user:pass@h/v1", (CHAT,), "http://user:pass@h"),
        ("http://h/v1x", (CHAT,), "http://h/v1x"),
    ],
)
def test_a_urls_trailing_api_path_is_not_repeated(url: str, paths: tuple[str, ...], root: str) -> None:
    assert root_of(url, paths) == root


@pytest.mark.parametrize("suffix", ["", "/", "/v1", "/v1/", "/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize("kind", ["vllm", "trtllm", "openai_completions", "lmdeploy", "auto"])
async def test_servers_are_reached_at_their_url(tokenizer: str, kind: str, suffix: str) -> None:
    async with serving() as server:
        for prefix in ("", "/proxied"):
            url = f"http://{HOST}:{server.port}{prefix}{suffix}"
            known = {"kind": kind, "url": url, "tokenizer": tokenizer, "max_model_len": 100}
            engine = engines.create(SETTINGS.validate_python(known))
            if kind == "auto":  # this server reports no owner
                with pytest.raises(
                    EngineDiedError, match=f"^cannot detect the kind of server at http://{HOST}:{server.port}{prefix};"
                ):
                    await engine.start()
                await engine.stop()
            else:
                async with started(engine):
                    pass
            assert f"{prefix}/v1/models" in server.paths
            assert all(path.count("/v1") <= 1 for path in server.paths)


@pytest.mark.parametrize("suffix", ["", "/v1", "/v1/chat/completions"])
async def test_apis_are_reached_at_their_url(suffix: str) -> None:
    async with serving() as server, started(chat(f"http://{HOST}:{server.port}/llm{suffix}")):
        assert server.paths == ["/llm/v1/chat/completions"]


# --- certificates ---------------------------------------------------------------------------------------------------


async def test_trusted_authorities(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving(certified(tmp_path, HOST)) as server:
        url = f"https://{HOST}:{server.port}"
        with pytest.raises(EngineDiedError, match=rf"^{url}: .*certificate.* engine\.ca_file.* SSL_CERT_FILE"):
            async with started(chat(url)):
                pass
        async with started(chat(url, ca_file=tmp_path / "ca.pem")):
            assert len(server.heads) == 1
        monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "ca.pem"))
        authorities.cache_clear()  # as in another process
        async with started(chat(url)):
            assert len(server.heads) == 2


async def test_a_permanent_failure_is_not_retried(tmp_path: Path, tokenizer: str) -> None:
    """An untrusted certificate will not become trusted within 15 minutes."""
    async with serving(certified(tmp_path, HOST)) as server:
        known = {"url": f"https://{HOST}:{server.port}", "tokenizer": tokenizer}
        for kind in ("vllm", "openai_completions", "auto"):
            engine = engines.create(SETTINGS.validate_python({"kind": kind, **known}))
            with pytest.raises(EngineDiedError, match=r"engine\.ca_file"):
                await engine.start()
            await engine.stop()


async def test_a_client_certificate(tmp_path: Path) -> None:
    context = certified(tmp_path, HOST, "worker")
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_verify_locations(tmp_path / "ca.pem")
    parts = (tmp_path / "worker.pem").read_text().partition("-----BEGIN PRIVATE KEY")
    (tmp_path / "cert.pem").write_text(parts[0])
    (tmp_path / "key.pem").write_text(parts[1] + parts[2])
    async with serving(context) as server:
        url, ca_file = f"https://{HOST}:{server.port}", tmp_path / "ca.pem"
        async with started(chat(url, ca_file=ca_file)):
            assert not server.heads  # how a server reports that it requires a certificate depends on timing
        for own in (
            {"client_cert_file": tmp_path / "worker.pem"},
            {"client_cert_file": tmp_path / "cert.pem", "client_key_file": tmp_path / "key.pem"},
        ):
            server.heads.clear()
            async with started(chat(url, ca_file=ca_file, **own)):
                assert len(server.heads) == 1


def test_unusable_files_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    certified(tmp_path, HOST)
    (tmp_path / "text").write_text("no certificate")
    locked = private_bytes(ec.generate_private_key(ec.SECP256R1()), b"secret")
    (tmp_path / "locked.pem").write_bytes((tmp_path / "ca.pem").read_bytes() + locked)
    for key, name in (
        ("ca_file", "missing"),
        ("ca_file", "text"),
        ("client_cert_file", "missing"),
        ("client_cert_file", "text"),
        ("client_cert_file", "ca.pem"),
        ("client_cert_file", "locked.pem"),
    ):
        with pytest.raises(EngineDiedError, match=rf"engine\.{key}.*{tmp_path / name}: "):
            chat("https://h", **{key: tmp_path / name})
    with pytest.raises(ValidationError, match="client_key_file: needs client_cert_file"):
        chat("https://h", client_key_file=tmp_path / "key.pem")
    monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "missing"))
    with pytest.raises(EngineDiedError, match="SSL_CERT_FILE"):
        chat("https://h")


# --- headers and proxies --------------------------------------------------------------------------------------------


async def test_headers_are_sent_with_every_request(tokenizer: str) -> None:
    headers = {"X-Route": "a b", "authorization": "Basic eA=="}
    async with serving() as server:
        url = f"http://{HOST}:{server.port}"
        known = {"kind": "vllm", "url": url, "tokenizer": tokenizer, "headers": headers}
        async with (
            started(chat(url, headers=headers)),
            started(engines.create(SETTINGS.validate_python(known))),
        ):
            assert len(server.heads) >= 3
        for head in server.heads:
            assert "\r\nx-route: a b\r\n" in head
            assert "\r\nauthorization: basic ea==\r\n" in head


@pytest.mark.parametrize(
    ("headers", "more", "message"),
    [
        ({"X Route": "a"}, {}, "X Route"),
        ({"X-Route": "a\r\nb: c"}, {}, "X-Route"),
        ({"X-Route": "é"}, {}, "X-Route"),
        ({"Content-Length": "7"}, {}, "Content-Length"),
        ({"Authorization": "a"}, {"api_key": "k"}, "'authorization'"),
    ],
)
def test_invalid_headers_are_named(headers: dict[str, str], more: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        chat("http://h", headers=headers, **more)


@contextlib.asynccontextmanager
async def proxying(target: Server) -> AsyncIterator[Server]:
    """A proxy that knows one server, and the requests that it got."""
    proxy = Server()
    connections: list[asyncio.Future[None]] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connections.append(asyncio.ensure_future(connect(reader, writer)))

    async def connect(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        proxy.heads.append(head.decode())
        server_reader, server_writer = await asyncio.open_connection(HOST, target.port)
        if head.startswith(b"CONNECT"):
            writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
        else:
            server_writer.write(head)
        await asyncio.gather(_copy(reader, server_writer), _copy(server_reader, writer))

    listening = await asyncio.start_server(serve, HOST, 0)
    async with listening:
        proxy.port = listening.sockets[0].getsockname()[1]
        yield proxy
    await asyncio.gather(*connections)


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(ConnectionError):
        while data := await reader.read(65_536):
            writer.write(data)
            await writer.drain()
    writer.close()


@pytest.mark.parametrize("is_tls", [False, True])
async def test_requests_use_the_configured_proxy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_tls: bool) -> None:
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")  # not read
    context = certified(tmp_path, "api.example") if is_tls else None
    async with serving(context) as server, proxying(server) as proxy:
        url = "https://api.example" if is_tls else "http://api.example"
        more = {"ca_file": tmp_path / "ca.pem"} if is_tls else {}
        async with started(chat(url, proxy=f"http://user:word@{HOST}:{proxy.port}", **more)):
            pass
        asked = "CONNECT api.example:443 " if is_tls else "POST http://api.example/v1/chat/completions "
        assert [head.startswith(asked) for head in proxy.heads] == [True]
        assert "proxy-authorization: Basic dXNlcjp3b3Jk" in proxy.heads[0].replace("Proxy-A", "proxy-a")
        assert len(server.heads) == 1


@pytest.mark.parametrize(
    "proxy",
    [
        "proxy:3128", "socks5://proxy:1080", "http://", "http://proxy/path", "http://user:word@", "http://proxy:0",
        "http://proxy:65536", "http://user:word@proxy:port", "http://user:w#rd@proxy:3128",
        "http://user:w?rd@proxy:3128", "http://user:w/rd@proxy:3128", "http://user:w rd@proxy:3128", "http://[::1",
    ],
)  # fmt: skip
def test_an_invalid_proxy_is_refused_by_name(proxy: str) -> None:
    with pytest.raises(ValidationError, match=r"proxy\n  Value error, must be http://host:port .*%23"):
        chat("http://h", proxy=proxy)


@pytest.mark.parametrize(
    "proxy", ["http://proxy", "http://proxy:3128/", "https://user:p%40ss@proxy:1", "http://u:p@ss@h", "http://[::1]:80"]
)
async def test_valid_proxy_addresses(proxy: str) -> None:
    await chat("http://h", proxy=proxy).stop()


# --- credentials ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("status", [401, 403])
@pytest.mark.parametrize("kind", ["vllm", "llamacpp", "sglang", "ollama", "openai_completions", "auto"])
async def test_a_servers_refusal_of_the_key_is_reported_at_the_start(tokenizer: str, kind: str, status: int) -> None:
    async with serving() as server:
        server.status = status
        url = f"http://{HOST}:{server.port}"
        engine = engines.create(
            SETTINGS.validate_python({"kind": kind, "url": url, "tokenizer": tokenizer, "max_model_len": 100})
        )
        with pytest.raises(EngineDiedError, match=rf"^{url}.* rejected the credentials \(engine\.api_key"):
            await engine.start()
        await engine.stop()


@pytest.mark.parametrize("status", [401, 403])
@pytest.mark.parametrize(
    "more",
    [
        *[{"kind": "openai_chat", "profile": name} for name in ("openai", "azure", "groq", "openrouter", "mistral")],
        {"kind": "openai_chat", "profile": "vllm"},
        {"kind": "anthropic"},
        {"kind": "bedrock", "aws_region": "eu-west-1", "api_key": "wrong"},
        {"kind": "sagemaker", "aws_region": "eu-west-1", "endpoint": "e", "api_key": "wrong"},
    ],
    ids=lambda more: str(more.get("profile", more["kind"])),
)
async def test_an_apis_refusal_of_the_key_is_reported_at_the_start(more: dict[str, Any], status: int) -> None:
    async with serving() as server:
        server.status = status
        url = f"http://{HOST}:{server.port}"
        engine = engines.create(SETTINGS.validate_python({"url": url, "model": "m", **more}))
        with pytest.raises(EngineDiedError, match=rf"^{url}/.* rejected the credentials .*with {status}"):
            await engine.start()
        await engine.stop()


@pytest.mark.parametrize("status", [200, 400, 404, 422, 429, 500, 503])
async def test_other_answers_do_not_reject_the_key(status: int) -> None:
    async with serving() as server:
        server.status = status
        async with started(chat(f"http://{HOST}:{server.port}")):
            assert len(server.heads) == 1


@pytest.mark.parametrize("status", [401, 404, 500])
async def test_the_log_names_the_url_of_an_error_without_its_password(
    status: int, caplog: pytest.LogCaptureFixture
) -> None:
    async with serving() as server, started(chat(f"http://user:word@{HOST}:{server.port}")) as engine:
        assert isinstance(engine, ChatServerEngine)
        server.status = status
        driver = Driver(engine)
        steps = asyncio.create_task(driver.run())
        engine.submit(ChatRequest("r", Chat((Turn("user", "a"),)), SamplingParams(), prompt_tokens=1))
        await driver.wait(lambda: driver.answers["r", 0].finish_reason is not None)
        error = driver.answers["r", 0].error or ""
        assert error == f"the server answered {status}: no"  # which its caller may read
        assert f"http://{HOST}:{server.port}/v1/chat/completions: {error}" in caplog.text
        assert "word@" not in caplog.text
        await engine.stop()
        await steps


# --- secrets ----------------------------------------------------------------------------------------------------------

SECRETS = {
    "api_key": "plain-words-as-a-key",
    "headers": {"X-Route": "secret-of-the-route", "X-Token": "Basic dXNlcjpzZWNyZXQ=", "X-Few": "few"},
    "proxy": "http://user:pass%20of%20the%20proxy@127.0.0.1:{port}",
}
NEVER_SHOWN = (
    "plain-words-as-a-key", "secret-of-the-route", "dXNlcjpzZWNyZXQ", "pass of the proxy", "pass%20of%20the%20proxy",
    "dXNlcjpwYXNzIG9mIHRoZSBwcm94eQ",
)  # fmt: skip
SHOWS: dict[str, Callable[[str], str]] = {
    "a page": lambda head: f"<html>{head}</html>",
    "an error": lambda head: json.dumps({"error": {"message": head.replace("\r\n", "; "), "code": "invalid_api_key"}}),
    "an event": lambda head: f"data: {json.dumps({'error': {'message': head.replace(chr(13), '')}})}\n\n",
    "an event with a status": lambda head: f"data: {json.dumps({'error': {'message': head, 'code': 429}})}\n\n",
    "a cut one": lambda head: "x" * (500 - 8) + head.partition("X-Route: ")[2],
}


@pytest.mark.parametrize("status", [200, 400, 401, 404, 429, 500, 503])
@pytest.mark.parametrize("shown", SHOWS)
async def test_secrets_echoed_by_a_server_are_masked(shown: str, status: int, caplog: pytest.LogCaptureFixture) -> None:
    async with serving() as server, proxying(server) as proxy:
        more = {**SECRETS, "proxy": str(SECRETS["proxy"]).format(port=proxy.port)}
        async with started(chat("http://api.example", **more)) as engine:
            assert isinstance(engine, ChatServerEngine)
            server.status, server.page = status, SHOWS[shown]
            driver = Driver(engine)
            steps = asyncio.create_task(driver.run())
            engine.submit(ChatRequest("r", Chat((Turn("user", "a"),)), SamplingParams(), prompt_tokens=1))
            await driver.wait(lambda: driver.answers["r", 0].finish_reason is not None)
            await engine.stop()
            await steps
        reported = f"{driver.answers['r', 0].error} {caplog.text}"
        assert [secret for secret in NEVER_SHOWN if secret in reported] == []
        assert "secret-of" not in reported  # nor a part of it


@pytest.mark.parametrize("kind", ["vllm", "openai_chat"])
async def test_a_refusal_at_the_start_masks_secrets(
    tokenizer: str, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with serving() as server, proxying(server) as proxy:
        server.status, server.page = 401, SHOWS["a page"]
        own = {"tokenizer": tokenizer} if kind == "vllm" else {"profile": "openai", "model": "m"}
        more = {**SECRETS, "proxy": str(SECRETS["proxy"]).format(port=proxy.port), **own}
        engine = engines.create(SETTINGS.validate_python({"kind": kind, "url": "http://api.example", **more}))
        with pytest.raises(EngineDiedError, match="rejected the credentials") as refused:
            await engine.start()
        await engine.stop()
        reported = f"{refused.value} {caplog.text} {engine!r}"
        assert [secret for secret in NEVER_SHOWN if secret in reported] == []
        assert "x-few: few" in reported.lower()  # too short to be distinguished from words


def test_which_values_count_as_secrets() -> None:
    settings = SETTINGS.validate_python({"kind": "vllm", "url": "http://h", "tokenizer": "t", **SECRETS,
                                         "proxy": "http://user:word@h:1"})  # fmt: skip
    assert secrets_of(settings) == ("Basic dXNlcjpzZWNyZXQ=", "plain-words-as-a-key", "secret-of-the-route",
                                    "dXNlcjpzZWNyZXQ=", "dXNlcjp3b3Jk")  # fmt: skip
    assert repr(settings).count("**********") == 5


async def test_an_unreachable_api_starts_and_its_errors_name_it(caplog: pytest.LogCaptureFixture) -> None:
    async with started(chat("http://127.0.0.1:1")):
        assert "cannot reach http://127.0.0.1:1/v1/chat/completions yet" in caplog.text
