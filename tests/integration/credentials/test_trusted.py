"""Requests of keys that demand trusted pools: answered there, continued there, and waiting for nobody else."""

import asyncio
from typing import Any

import openai
from sqlalchemy import select

from db.engine import create_engine
from db.tables import AttemptRow, RequestRow
from protocol import subjects
from protocol.nats.objects import MAX_INLINE_PROMPT_BYTES
from protocol.nats.topology import read_backlog
from spillway.nats_accounts import of_pool
from tests.integration.credentials.conftest import MODEL, SLOW, TRUSTED_QUEUE, Installation
from tests.integration.pool_worker.playing_gateway import running_worker
from tests.integration.pool_worker.worker_process import start_process
from tests.waiting import until

WHOLE: dict[str, Any] = {"max_tokens": 60, "extra_body": {"ignore_eos": True}}


async def pool_of(client: openai.AsyncOpenAI, prompt: str = "hello", **rest: Any) -> str:
    answer = await client.completions.with_raw_response.create(model=MODEL, prompt=prompt, max_tokens=4, **rest)
    return str(answer.headers["x-spillway-pool"])


async def attempts(installation: Installation) -> set[tuple[str, str, int]]:
    """(name of the key, pool, attempt) of all attempts that are in SQL."""
    engine = create_engine(installation.database_url)
    try:
        async with engine.connect() as connection:
            rows = select(RequestRow.key_name, AttemptRow.pool, AttemptRow.attempt).join(
                AttemptRow, AttemptRow.request_id == RequestRow.request_id
            )
            return {(name, pool, attempt) for name, pool, attempt in await connection.execute(rows)}
    finally:
        await engine.dispose()


async def test_they_are_answered_by_trusted_pools_alone(installation: Installation) -> None:
    confidential = installation.gateway.client(api_key=installation.confidential_key)
    ordinary = installation.gateway.client()
    watching = await installation.queue.connect("gateway")
    installation.queue.authority.issue(of_pool("vault"), "box7", lasts_s=3600)
    process = start_process(installation.worker_settings("vault", name="box7", engine=SLOW))
    async with running_worker(installation.worker_settings("demo")):
        await until(lambda: process.said("ready\n"))
        await installation.ready()
        stream = await confidential.completions.create(model=MODEL, prompt="hello", stream=True, **WHOLE)
        text = ""
        while len(text) < 20:
            text += (await anext(stream)).choices[0].text
        process.kill()
        rest = asyncio.create_task(rest_of(stream))

        async def waits_for_another() -> bool:
            jobs = (await read_backlog(watching)).jobs
            return jobs.get(subjects.job_subject(TRUSTED_QUEUE, subjects.RESUME_LANE)) == 1

        await until(waits_for_another)
        batch = asyncio.create_task(pool_of(confidential, extra_body={"service_tier": "flex"}))
        large = "confidential " * (MAX_INLINE_PROMPT_BYTES // 4)
        keyed = asyncio.create_task(pool_of(confidential, large, extra_headers={"Idempotency-Key": "k"}))
        # The other pool idles, and takes only what is its own.
        assert [await pool_of(ordinary) for _ in range(3)] == ["demo"] * 3
        assert not any(task.done() for task in (rest, batch, keyed))
        async with running_worker(installation.worker_settings("vault", instance="w2", engine=SLOW)):
            text += await rest
            assert [await batch, await keyed, await pool_of(ordinary)] == ["vault", "vault", "demo"]
            whole = await confidential.completions.create(model=MODEL, prompt="hello", **WHOLE)
            assert text == whole.choices[0].text

            async def are_counted() -> bool:
                return await attempts(installation) >= {("confidential", "vault", 2), ("test", "demo", 1)}

            await until(are_counted)
    assert {(key, pool) for key, pool, _ in await attempts(installation)} == {
        ("confidential", "vault"),
        ("test", "demo"),
    }


async def rest_of(stream: openai.AsyncStream[Any]) -> str:
    return "".join([chunk.choices[0].text async for chunk in stream])


async def test_a_drained_worker_hands_back_to_trusted_ones(installation: Installation) -> None:
    confidential = installation.gateway.client(api_key=installation.confidential_key)
    settings: dict[str, Any] = {"engine": SLOW, "drain_s": 0.1}
    async with (
        running_worker(installation.worker_settings("demo")),
        running_worker(installation.worker_settings("vault", **settings)) as stop,
    ):
        await installation.ready()
        stream = await confidential.completions.create(model=MODEL, prompt="hello", stream=True, **WHOLE)
        text = (await anext(stream)).choices[0].text
        async with running_worker(installation.worker_settings("vault", instance="w2", **settings)):
            stop.request()
            text += await rest_of(stream)
            whole = await confidential.completions.create(model=MODEL, prompt="hello", **WHOLE)
            assert text == whole.choices[0].text
