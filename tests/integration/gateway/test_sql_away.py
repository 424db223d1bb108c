"""A gateway whose PostgreSQL is gone: keys go on working, and whoever needs SQL itself is told so."""

import asyncio
from typing import Any

import httpx
import openai
import pytest

from db.accounts.keys import create_key
from db.engine import create_engine
from protocol import subjects
from tests.integration.gateway.conftest import MODEL, PEPPER, Start
from tests.postgres import PostgresServer
from tests.waiting import until

HELLO: list[Any] = [{"role": "user", "content": "Hi"}]


async def status_with(client: openai.AsyncOpenAI) -> tuple[int, str | None]:
    """The status and code that a request of this client gets."""
    try:
        await client.chat.completions.create(model=MODEL, messages=HELLO)
    except openai.APIStatusError as error:
        return error.status_code, error.code
    return 200, None


async def test_without_sql_known_keys_are_served_and_all_else_is_told_to_wait(
    start_gateway: Start, postgres_server: PostgresServer, postgres_url: str
) -> None:
    gateway = await start_gateway(database_url=postgres_url, console={})
    await gateway.add_worker()
    nobody = gateway.client(api_key="sk-sw-nobody")
    assert await status_with(nobody) == (401, "invalid_api_key")
    await asyncio.to_thread(postgres_server.stop)
    try:
        await gateway.bus.publish(subjects.KEYS_CHANGED_SUBJECT, b"")  # a key that nobody can look up

        async def is_told_to_wait() -> bool:
            return await status_with(nobody) == (503, "database_unavailable")

        await until(is_told_to_wait)
        assert await status_with(gateway.client()) == (200, None)
        async with httpx.AsyncClient(base_url=gateway.url, cookies={"spillway_session": "x"}) as client:
            assert (await client.get("/readyz")).status_code == 200
            for page in ("/login", "/dashboard"):
                answer = await client.get(page)
                assert answer.status_code == 503
                assert "The database is unavailable" in answer.text
    finally:
        await asyncio.to_thread(postgres_server.start)
    engine = create_engine(postgres_url)
    _, key = await create_key(engine, "new", PEPPER)
    await engine.dispose()
    await gateway.bus.publish(subjects.KEYS_CHANGED_SUBJECT, b"")
    new = gateway.client(api_key=key)

    async def is_served() -> bool:
        return await status_with(new) == (200, None)

    await until(is_served)

    async def is_refused() -> bool:  # once all changes are loaded, the last of which may be on its way
        return await status_with(nobody) == (401, "invalid_api_key")

    await until(is_refused)


async def test_a_gateway_that_starts_without_sql_says_what_it_waits_for(
    start_gateway: Start, postgres_server: PostgresServer, postgres_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    gateway = await start_gateway(database_url=postgres_url)
    await gateway.add_worker()
    await gateway.end()
    gateway.stop.clear()
    await asyncio.to_thread(postgres_server.stop)
    try:
        starting = asyncio.create_task(gateway.start())
        await until(lambda: "waiting for the database: " in caplog.text)
        assert f"127.0.0.1:{postgres_server.port}" in caplog.text
    finally:
        await asyncio.to_thread(postgres_server.start)
    await starting
    assert await status_with(gateway.client()) == (200, None)
