"""``/v1/files`` as OpenAI's client uses it, and as others misuse it."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import httpx
import openai
import pytest

from accounts.keys import Grant, create_key
from accounts.teams import create_team
from db.engine import create_engine
from protocol import subjects
from tests.integration.gateway.conftest import PEPPER, GatewayUnderTest, Start
from tests.integration.gateway.test_errors import error_of
from tests.waiting import HANGS_S, until

LINES = b'{"custom_id": "1"}\n' * 1000


@pytest.fixture
async def either(start_gateway: Start, database_url: str) -> GatewayUnderTest:
    """On either database."""
    return await start_gateway(database_url=database_url, with_card=False)


@pytest.fixture
async def gateway(start_gateway: Start) -> GatewayUnderTest:
    batches = {"max_file_bytes": 100_000, "max_tenant_bytes": 150_000, "max_tenant_files": 5, "upload_silence_s": 0.3}
    return await start_gateway(with_card=False, batches=batches)


@pytest.fixture
async def http(gateway: GatewayUnderTest) -> AsyncIterator[httpx.AsyncClient]:
    headers = {"authorization": f"Bearer {gateway.key}"}
    async with httpx.AsyncClient(base_url=gateway.url, headers=headers, timeout=HANGS_S) as client:
        yield client


async def client_of(gateway: GatewayUnderTest, name: str, team_id: str) -> openai.AsyncOpenAI:
    """A client with a new key of a team."""
    engine = create_engine(gateway.settings.database_url)
    _, token = await create_key(engine, name, PEPPER, Grant(team_id=team_id))
    await engine.dispose()
    await gateway.bus.publish(subjects.KEYS_CHANGED_SUBJECT, b"")
    client = gateway.client(api_key=token)

    async def is_known() -> bool:
        try:
            await client.models.list()
        except openai.APIStatusError:
            return False
        return True

    await until(is_known)
    return client


async def test_upload_list_retrieve_content_delete(either: GatewayUnderTest) -> None:
    client = either.client()
    made = await client.files.create(file=("lines.jsonl", LINES), purpose="batch")
    assert (made.bytes, made.filename, made.purpose, made.status) == (len(LINES), "lines.jsonl", "batch", "processed")
    assert made.expires_at == made.created_at + 30 * 24 * 3600
    second = await client.files.create(
        file=b"{}\n", purpose="batch", expires_after={"anchor": "created_at", "seconds": 7200}
    )
    assert second.expires_at == second.created_at + 7200
    assert [file.id async for file in client.files.list(limit=1)] == [second.id, made.id]
    assert [file.id async for file in client.files.list(limit=1, order="asc")] == [made.id, second.id]
    assert [file.id async for file in client.files.list(purpose="batch_output")] == []
    assert await client.files.retrieve(made.id) == made
    assert (await client.files.content(made.id)).content == LINES
    assert (await client.files.delete(made.id)).deleted
    for gone in (client.files.retrieve(made.id), client.files.content(made.id), client.files.delete(made.id)):
        with pytest.raises(openai.NotFoundError):
            await gone
    assert not (either.settings.data_dir / "files" / made.id).exists()


async def test_files_belong_to_the_team(gateway: GatewayUnderTest) -> None:
    engine = create_engine(gateway.settings.database_url)
    team = await create_team(engine, "research", "cli:test")
    await engine.dispose()
    clients = [await client_of(gateway, name, team.team_id) for name in ("one", "two")]
    stranger = gateway.client()
    mine = await clients[0].files.create(file=LINES, purpose="batch")
    assert [file.id async for file in clients[1].files.list()] == [mine.id]
    with pytest.raises(openai.NotFoundError):
        await stranger.files.retrieve(mine.id)
    with pytest.raises(openai.NotFoundError):
        await stranger.files.list(after=mine.id)
    assert [file.id async for file in stranger.files.list()] == []


WRONG_FORMS: list[tuple[dict[str, Any], str | None, str]] = [
    ({"files": {"file": ("a", b"")}, "data": {"purpose": "batch"}}, "file", "empty_file"),
    ({"files": {"file": ("a", b"x")}}, "purpose", "missing_required_parameter"),
    ({"files": {"file": ("a", b"x")}, "data": {"purpose": "fine-tune"}}, "purpose", "invalid_value"),
    ({"files": {"other": ("a", b"x")}, "data": {"purpose": "batch"}}, "other", "invalid_value"),
    ({"files": {"purpose": (None, b"batch")}}, "file", "missing_required_parameter"),
    (
        {"files": {"file": ("a", b"x")}, "data": {"purpose": "batch", "expires_after[seconds]": "60"}},
        "expires_after[seconds]",
        "invalid_value",
    ),
    ({"files": {"file": ("a", b"x")}, "data": {"purpose": "b" * 5000}}, "purpose", "invalid_value"),
    ({"json": {"purpose": "batch"}}, None, "invalid_value"),
    (
        {"content": b"--x\r\nnonsense", "headers": {"content-type": "multipart/form-data; boundary=x"}},
        None,
        "invalid_value",
    ),
]


async def test_a_wrong_form_is_refused_and_leaves_nothing(http: httpx.AsyncClient, gateway: GatewayUnderTest) -> None:
    for form, param, code in WRONG_FORMS:
        assert error_of(await http.post("/v1/files", **form)) == (400, code, param)
    assert list((gateway.settings.data_dir / "files").glob("*/*")) == []


async def test_bounds_of_a_file_and_of_a_tenant(http: httpx.AsyncClient) -> None:
    async def upload(size: int) -> httpx.Response:
        return await http.post("/v1/files", files={"file": ("a", b"x" * size)}, data={"purpose": "batch"})

    assert error_of(await upload(100_001)) == (413, "request_too_large", None)
    assert (await upload(100_000)).status_code == 200
    assert error_of(await upload(50_001)) == (413, "request_too_large", None)
    assert (await upload(50_000)).status_code == 200
    refused = await upload(1)
    assert error_of(refused) == (429, "file_quota_exceeded", None)
    assert refused.headers["x-should-retry"] == "false"


async def test_an_upload_that_stands_still_is_given_up(gateway: GatewayUnderTest) -> None:
    part = '--x\r\ncontent-disposition: form-data; name="file"; filename="a"\r\n\r\nhalf'
    head = (
        "POST /v1/files HTTP/1.1\r\nhost: x\r\ncontent-type: multipart/form-data; boundary=x\r\n"
        f"content-length: 999\r\nauthorization: Bearer {gateway.key}\r\n\r\n"
    )
    reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
    writer.write(f"{head}{part}".encode())
    async with asyncio.timeout(HANGS_S):
        assert (await reader.readline()).split()[1] == b"408"
    writer.close()
    assert list((gateway.settings.data_dir / "files").glob("*/*")) == []


async def test_a_key_is_needed(gateway: GatewayUnderTest) -> None:
    async with httpx.AsyncClient(base_url=gateway.url) as nobody:
        for method, path in (("GET", ""), ("POST", ""), ("GET", "/file-1"), ("DELETE", "/file-1")):
            assert error_of(await nobody.request(method, f"/v1/files{path}"))[0] == 401
