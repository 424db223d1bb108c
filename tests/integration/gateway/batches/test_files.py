"""``/v1/files`` with OpenAI's client, and its misuse."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import pytest_asyncio

from db.accounts.keys import Grant, create_key
from db.accounts.principal import Policy
from db.accounts.teams import Team, create_team
from db.engine import create_engine
from gateway.batches.files import SWEEP_GRACE_MS, File, FileGone, Files, Part
from gateway.batches.storage.local import UNFINISHED, LocalStorage
from gateway.batches.store import OVER, Batch, Batches, Status
from gateway.tokenizing.encoder_pool import EncoderPool
from protocol import subjects
from tests.integration.gateway.conftest import PEPPER, GatewayUnderTest, Share, Start
from tests.integration.gateway.test_errors import error_of
from tests.waiting import HANGS_S, until

LINES = b'{"custom_id": "1"}\n' * 1000


@pytest_asyncio.fixture(loop_scope="module")
async def gateway(share_gateway: Share) -> GatewayUnderTest:
    batches = {"max_file_bytes": 100_000, "max_tenant_bytes": 150_000, "max_tenant_files": 5, "upload_silence_s": 0.3}
    return await share_gateway(with_card=False, batches=batches)


def files_of(gateway: GatewayUnderTest) -> set[Path]:
    return set((gateway.settings.data_dir / "files").glob("*/*"))


@pytest_asyncio.fixture(loop_scope="module")
async def http(gateway: GatewayUnderTest) -> AsyncIterator[httpx.AsyncClient]:
    headers = {"authorization": f"Bearer {gateway.key}"}
    async with httpx.AsyncClient(base_url=gateway.url, headers=headers, timeout=HANGS_S) as client:
        yield client


async def client_of(gateway: GatewayUnderTest, name: str, team_id: str) -> openai.AsyncOpenAI:
    """Return a client with a new key of a team."""
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


async def team_of(gateway: GatewayUnderTest, name: str) -> Team:
    """Create a team."""
    engine = create_engine(gateway.settings.database_url)
    team = await create_team(engine, name, "cli:test")
    await engine.dispose()
    return team


async def test_upload_list_retrieve_content_delete(start_gateway: Start, postgres_url: str) -> None:
    """With PostgreSQL; all other tests use SQLite."""
    gateway = await start_gateway(database_url=postgres_url, with_card=False)
    client = gateway.client()
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
    assert not (gateway.settings.data_dir / "files" / made.id).exists()


async def test_files_belong_to_the_team(gateway: GatewayUnderTest) -> None:
    team = await team_of(gateway, "research")
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


async def test_an_invalid_form_is_refused_and_leaves_nothing(
    http: httpx.AsyncClient, gateway: GatewayUnderTest
) -> None:
    before = files_of(gateway)
    for form, param, code in WRONG_FORMS:
        assert error_of(await http.post("/v1/files", **form)) == (400, code, param)
    assert files_of(gateway) == before


async def test_limits_of_a_file_and_a_tenant(http: httpx.AsyncClient) -> None:
    async def upload(size: int) -> httpx.Response:
        return await http.post("/v1/files", files={"file": ("a", b"x" * size)}, data={"purpose": "batch"})

    assert error_of(await upload(100_001)) == (413, "request_too_large", None)
    assert (await upload(100_000)).status_code == 200
    assert error_of(await upload(50_001)) == (413, "request_too_large", None)
    assert (await upload(50_000)).status_code == 200
    refused = await upload(1)
    assert error_of(refused) == (429, "file_quota_exceeded", None)
    assert refused.headers["x-should-retry"] == "false"


PART = b'--x\r\ncontent-disposition: form-data; name="file"; filename="a"\r\n\r\nhalf'
Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]


async def begin_upload(gateway: GatewayUnderTest, key: str, path: str = "/v1/files", part: bytes = PART) -> Connection:
    """Begin an upload that does not end."""
    reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
    head = (
        f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-type: multipart/form-data; boundary=x\r\n"
        f"content-length: 9999\r\nauthorization: Bearer {key}\r\n\r\n"
    )
    writer.write(head.encode() + part)
    return reader, writer


async def status_of(reader: asyncio.StreamReader) -> bytes:
    async with asyncio.timeout(HANGS_S):
        return (await reader.readline()).split()[1]


async def uploading(gateway: GatewayUnderTest, count: int) -> None:
    """Wait until this many uploads are in progress."""
    engine = create_engine(gateway.settings.database_url)

    async def are_there() -> bool:
        async with engine.connect() as connection:
            found = await connection.exec_driver_sql("SELECT count(*) FROM files WHERE purpose = 'uploading'")
            return int(found.scalar_one()) == count

    await until(are_there)
    await engine.dispose()


async def test_a_stalled_upload_is_aborted(gateway: GatewayUnderTest) -> None:
    before = files_of(gateway)
    reader, writer = await begin_upload(gateway, gateway.key)
    assert await status_of(reader) == b"408"
    writer.close()
    assert files_of(gateway) == before
    await uploading(gateway, 0)


async def test_an_endless_upload_is_aborted(start_gateway: Start) -> None:
    """Even if it is fast."""
    gateway = await start_gateway(with_card=False, batches={"upload_silence_s": HANGS_S, "upload_s": 0.3})
    reader, writer = await begin_upload(gateway, gateway.key)
    assert await status_of(reader) == b"408"
    await uploading(gateway, 0)
    writer.close()


@pytest.mark.parametrize("path", ["/v1/files", "/v1/messages/batches"])
async def test_a_slow_upload_is_aborted(share_gateway: Share, path: str) -> None:
    """A byte every ten seconds once held a slot for an hour."""
    pace = {"upload_min_bytes_per_s": 1_000_000, "upload_pace_s": 0.2}
    gateway = await share_gateway(with_card=False, batches={"upload_silence_s": HANGS_S, **pace})
    reader, writer = await begin_upload(gateway, gateway.key, path, PART if path == "/v1/files" else b'{"requests": [')
    answering = asyncio.create_task(status_of(reader))
    while not answering.done():
        writer.write(b" ")
        await asyncio.sleep(0.01)
    assert await answering == b"408"
    writer.close()


@pytest.mark.parametrize("path", ["/v1/files", "/v1/messages/batches"])
async def test_one_tenant_leaves_slots_to_others(share_gateway: Share, path: str) -> None:
    """One key once held all 16 slots; other keys got 503."""
    gateway = await share_gateway(with_card=False, batches={"max_uploads": 4, "upload_silence_s": HANGS_S})
    _, key = await gateway.make_key()
    other = gateway.client(api_key=key)
    part = PART if path == "/v1/files" else b'{"requests": ['
    held = [await begin_upload(gateway, gateway.key, path, part) for _ in range(2)]
    await uploading(gateway, 2)
    refused, writer = await begin_upload(gateway, gateway.key, path, part)
    assert await status_of(refused) == b"429"
    writer.close()
    assert (await other.files.create(file=LINES, purpose="batch")).bytes == len(LINES)
    for _, writer in held:
        writer.close()
    await uploading(gateway, 0)
    mine = gateway.client()
    assert (await mine.files.create(file=LINES, purpose="batch")).bytes == len(LINES)


async def test_bytes_of_uploads_in_progress_count(start_gateway: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise each concurrent upload could fill the tenant's remaining storage."""
    monkeypatch.setattr("gateway.batches.upload.WRITE_BYTES", 1)
    batches = {"max_tenant_bytes": 150_000, "upload_silence_s": HANGS_S}
    gateway = await start_gateway(with_card=False, batches=batches)
    held = [await begin_upload(gateway, gateway.key, part=PART + b"x" * 9_000) for _ in range(2)]

    async def are_written() -> bool:
        parts = (gateway.settings.data_dir / "files").glob(f"*/*{UNFINISHED}")
        return sum(path.stat().st_size for path in parts) > 16_000

    await until(are_written)
    with pytest.raises(openai.APIStatusError, match="in total") as refused:
        await gateway.client().files.create(file=b"x" * 140_000, purpose="batch")
    assert refused.value.status_code == 413
    for _, writer in held:
        writer.close()

    async def has_room() -> bool:
        try:
            await gateway.client().files.create(file=b"x" * 140_000, purpose="batch")
        except openai.APIStatusError as error:
            if error.status_code != 413:
                raise
            return False
        return True

    await until(has_room)


async def test_message_batches_are_parsed_in_their_tenants_threads(
    http: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the event loop, a batch of 4 MiB would block all other requests."""
    asked: list[tuple[str, int]] = []
    run = EncoderPool.run

    async def noted(self: EncoderPool, tenant: str, size_bytes: int, work: Any, *, is_quick: bool = False) -> Any:
        asked.append((tenant, size_bytes))
        return await run(self, tenant, size_bytes, work, is_quick=is_quick)

    monkeypatch.setattr(EncoderPool, "run", noted)
    params: Any = {"model": "m", "max_tokens": 4, "messages": [{"role": "user", "content": "x" * 50_000}]}
    body = {"requests": [{"custom_id": "a", "params": params}]}
    made = await http.post("/v1/messages/batches", json=body)
    assert made.json()["request_counts"]["processing"] == 1
    assert len({tenant for tenant, _ in asked}) == 1
    assert sum(size for _, size in asked) > 50_000


async def test_uploads_are_requests_in_the_limits_of_their_key(start_gateway: Start) -> None:
    gateway = await start_gateway(with_card=False)
    engine = create_engine(gateway.settings.database_url)
    policy = Policy(requests_per_minute=3)
    _, token = await create_key(engine, "limited", PEPPER, Grant(policy=policy))
    await engine.dispose()
    await gateway.bus.publish(subjects.KEYS_CHANGED_SUBJECT, b"")
    headers = {"authorization": f"Bearer {token}"}
    async with httpx.AsyncClient(base_url=gateway.url, headers=headers, timeout=HANGS_S) as client:

        async def is_known() -> bool:
            return (await client.get("/v1/models")).status_code == httpx.codes.OK

        await until(is_known)
        body: dict[str, Any] = {"files": {"file": ("a", b"x")}, "data": {"purpose": "batch"}}
        first = await client.post("/v1/files", **body)
        assert (first.status_code, first.headers["x-ratelimit-remaining-requests"]) == (200, "2")
        assert (await client.post("/v1/files", json={})).status_code == 400  # refused uploads count, too
        assert (await client.post("/v1/messages/batches", json={})).status_code == 400
        for path in ("/v1/files", "/v1/messages/batches"):
            refused = await client.post(path, **body)
            assert (refused.status_code, refused.headers["x-ratelimit-remaining-requests"]) == (429, "0")


async def test_a_form_without_end_is_refused(http: httpx.AsyncClient) -> None:
    """Data before and after the form does not count as part of the file."""
    form = b'--x\r\ncontent-disposition: form-data; name="purpose"\r\n\r\nbatch\r\n--x--\r\n'
    headers = {"content-type": "multipart/form-data; boundary=x"}
    refused = await http.post("/v1/files", content=form + b"x" * 400_000, headers=headers)
    assert error_of(refused) == (413, "request_too_large", None)


# --- gateways that die, and files that expire -------------------------------------------------------------------------


class Store:
    """The files of a gateway that is not running."""

    def __init__(self, database_url: str, folder: Path) -> None:
        self.folder = folder
        self.engine = create_engine(database_url)
        self.files = Files(self.engine, LocalStorage(folder))

    def file(self, file_id: str, *, expires_unix_ms: int = 1 << 50) -> File:
        return File(file_id, "t", "k", 1, expires_unix_ms, "batch", "a", 1)

    async def write(self, file_id: str) -> None:
        async with self.files.storage.writing(f"{file_id}/0") as writer:
            await writer.write(b"x")

    def left(self) -> list[str]:
        return sorted(path.name for path in self.folder.glob("*"))

    async def ids(self) -> list[str]:
        async with self.engine.connect() as connection:
            return sorted((await connection.exec_driver_sql("SELECT id FROM files")).scalars())


@pytest.fixture
async def store(database_url: str, tmp_path: Path) -> AsyncIterator[Store]:
    """Return a store on each database."""
    store = Store(database_url, tmp_path / "files")
    yield store
    await store.engine.dispose()


async def test_files_of_a_dead_gateway_are_swept(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a crash during an upload or deletion, bytes once stayed forever."""
    for name in ("file-stored", "file-half", "file-deleted", "file-kept", "file-coming"):
        until_ms = 1 if name in {"file-stored", "file-half"} else 1 << 50
        await store.files.begin(store.file(name), until_ms)
        await store.write(name)
        if name in {"file-deleted", "file-kept"}:
            assert await store.files.complete(store.file(name), [Part(name, 0, f"{name}/0", 1)])
    (store.folder / "file-half" / "0").rename(store.folder / "file-half" / "0.part")
    with monkeypatch.context() as dying:
        dying.setattr(store.files.storage, "names", _dies)
        with pytest.raises(KeyError):
            await store.files.delete("file-deleted")
    assert await store.files.find("file-deleted", "t") is None
    assert await store.files.find("file-coming", "t") is None
    assert not await store.files.complete(store.file("file-stored"), [Part("file-stored", 0, "file-stored/0", 1)])
    await store.files.sweep(OVER)
    assert store.left() == await store.ids() == ["file-coming", "file-kept"]
    assert not await store.files.complete(store.file("file-stored"), [])
    assert await store.files.usage("t") == (1, 1)


async def test_a_file_stays_for_a_grace_period_after_expiry(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch may have just been created from it."""
    monkeypatch.setattr("gateway.batches.files.unix_now_ms", lambda: 2 * SWEEP_GRACE_MS)
    for name, age_ms in (("file-young", SWEEP_GRACE_MS - 1), ("file-old", SWEEP_GRACE_MS)):
        await store.files.begin(store.file(name), 2 * SWEEP_GRACE_MS - age_ms)
        await store.write(name)
    await store.files.sweep(OVER)
    assert store.left() == await store.ids() == ["file-young"]


@pytest.mark.parametrize("read_parts", [0, 1])
async def test_reading_a_deleted_file_fails(store: Store, monkeypatch: pytest.MonkeyPatch, read_parts: int) -> None:
    """Results once ended early without an error."""
    monkeypatch.setattr("gateway.batches.files.SWEPT_AT_A_TIME", 1)  # page size of parts, too
    await store.files.begin(store.file("file-read"), 1 << 50)
    for number in range(3):
        async with store.files.storage.writing(f"file-read/{number}") as writer:
            await writer.write(b"x")
    parts = [Part("file-read", number, f"file-read/{number}", 1) for number in range(3)]
    assert await store.files.complete(store.file("file-read"), parts)
    assert len([piece async for piece in store.files.content("file-read")]) == 3
    pieces = store.files.content("file-read")
    for _ in range(read_parts):
        await anext(pieces)
    await store.files.delete("file-read")
    with pytest.raises(FileGone):
        await anext(pieces)


async def _dies(_prefix: str) -> list[str]:
    raise KeyError


async def test_an_expired_file_stays_while_a_batch_uses_it(store: Store) -> None:
    """A gateway that took over the batch once found no lines, and failed it as empty."""
    for name in ("file-read", "file-unread"):
        await store.files.begin(store.file(name), 1 << 50)
        await store.write(name)
        assert await store.files.complete(store.file(name, expires_unix_ms=1), [Part(name, 0, f"{name}/0", 1)])
    batches = Batches(store.engine)
    batch = Batch(
        id="batch_1", surface="openai", tenant="t", team_id="t", key_id="k", key_name="k", endpoint="/v1/completions",
        input_file_id="file-read", completion_window="24h", created_unix_ms=1, expires_unix_ms=1 << 50,
    )  # fmt: skip
    await batches.add(batch)
    await store.files.sweep(OVER)
    assert store.left() == await store.ids() == ["file-read"]
    assert b"".join([piece async for piece in store.files.content("file-read")]) == b"x"
    await batches.end(await batches.take(batch.id, "g"), Status.COMPLETED, 1.0)
    await store.files.sweep(OVER)
    assert store.left() == await store.ids() == []


async def test_a_key_is_needed(gateway: GatewayUnderTest) -> None:
    async with httpx.AsyncClient(base_url=gateway.url) as nobody:
        for method, path in (("GET", ""), ("POST", ""), ("GET", "/file-1"), ("DELETE", "/file-1")):
            assert error_of(await nobody.request(method, f"/v1/files{path}"))[0] == 401
