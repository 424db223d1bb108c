"""Whole requests where every part has its own credentials and nothing else, and a change of them all under load."""

import asyncio
import base64
import contextlib
import re
import signal
import zlib
from collections.abc import AsyncIterator, Callable
from datetime import datetime
from pathlib import Path
from typing import Any
from unittest import mock

from msgspec.structs import replace
from typer.testing import CliRunner

from db.engine import create_engine
from gateway.limits.seeds import until_ledger_is_current
from ledger.settings import LedgerSettings
from ledger.writer import LedgerWriter
from pool_worker.settings import GateSettings
from protocol import subjects
from protocol.errors import BusError
from protocol.job import encode
from protocol.job import encode as encode_record
from protocol.nats import objects
from protocol.nats.objects import MAX_INLINE_PROMPT_BYTES
from protocol.usage import OpenRequestsQuery, decode_still_open, encode_usage
from spillway.cli import app
from spillway.nats_accounts import of_pool
from tests.integration.credentials.conftest import MODEL, SLOW, Installation, Queue, has_rows
from tests.integration.gateway.conftest import card
from tests.integration.pool_worker.playing_gateway import running_worker
from tests.integration.pool_worker.worker_process import start_process
from tests.small_tokenizer import byte_tokenizer_json
from tests.usage_records import request_intent
from tests.waiting import HANGS_S, until

OWN_CARD = replace(card(), model=MODEL)


async def test_a_request_is_answered_and_counted(installation: Installation) -> None:
    async with running_worker(installation.worker_settings()):
        await installation.ready()
        text = await installation.complete(max_tokens=8)
        stream = await installation.gateway.client().completions.create(
            model=MODEL, prompt="hello", max_tokens=8, stream=True
        )
        assert "".join([chunk.choices[0].text async for chunk in stream]) == text
        await until(lambda: has_rows(installation, 2, 2))


async def test_workers_that_store_the_same_tokenizer_at_once_ask_for_nothing_that_they_may_not(queue: Queue) -> None:
    for pool in ("demo", "vault"):
        worker = await queue.connect_worker(queue.folder / f"{of_pool(pool)}.creds", pool, "pool")
        with mock.patch.object(objects, "has_object", _says_no):  # neither has seen the other's
            await objects.publish_model_card(worker, OWN_CARD, byte_tokenizer_json())
    gateway = await queue.connect("gateway")
    stored = await objects.get_object(gateway, subjects.ARTIFACTS_BUCKET, OWN_CARD.tokenizer_object)
    assert stored == byte_tokenizer_json()
    assert "Violation" not in (queue.server.folder / "nats.log").read_text()


async def _says_no(*_: object) -> bool:
    return False


async def test_a_gateway_may_wait_for_the_ledger_and_tell_it_so(queue: Queue, sqlite_url: str) -> None:
    gateway, ledger = await queue.connect("gateway"), await queue.connect("ledger")
    engine, stopping = create_engine(sqlite_url), asyncio.Event()
    settings = LedgerSettings(nats_urls=(), database_url=sqlite_url, hold_intents_s=2 * HANGS_S)  # unless it is told
    writer = asyncio.create_task(LedgerWriter(ledger, engine, settings, stopping).run())
    intent = encode_usage([encode_record(request_intent("runs"))])
    await gateway.publish_durable(subjects.INTENT_USAGE_SUBJECT, intent, message_id="runs")

    async def is_current() -> bool:
        try:
            await until_ledger_is_current(gateway)
        except BusError:  # it was told before it listened
            return False
        return True

    await until(is_current)
    stopping.set()
    await writer
    await engine.dispose()


async def test_a_response_is_made_in_the_background_and_deleted(installation: Installation) -> None:
    async with running_worker(installation.worker_settings()):
        await installation.ready()
        responses = installation.gateway.client().responses
        made = await responses.create(model=MODEL, input="hello", max_output_tokens=8, background=True)
        events = [event async for event in await responses.retrieve(made.id, stream=True)]
        assert events[-1].type == "response.incomplete"

        async def has_ended() -> bool:
            return (await responses.retrieve(made.id)).status == "incomplete"

        await until(has_ended)
        more = await responses.create(model=MODEL, input="more", max_output_tokens=8, previous_response_id=made.id)
        assert more.output_text
        assert (await responses.cancel(made.id)).status == "incomplete"
        await responses.delete(made.id)


async def test_a_machine_has_credentials_of_its_own(installation: Installation) -> None:
    installation.queue.authority.issue(of_pool("demo"), "box7", lasts_s=3600)
    gate = GateSettings(backlog_jobs=0, oldest_s=0.01)
    async with running_worker(installation.worker_settings(name="box7", tier="on-demand", gate=gate)):
        await installation.ready()
        assert await installation.complete(max_tokens=4)
        await until(lambda: has_rows(installation, 1, 1))


async def test_a_large_prompt_travels_sealed(installation: Installation) -> None:
    words = "confidential " * (MAX_INLINE_PROMPT_BYTES // 4)
    bus = await installation.queue.connect("gateway")
    stored: list[bytes] = []

    async def has_seen() -> bool:
        message = await bus.get_message("OBJ_prompts", seq=1)
        stored.extend([] if message is None else [base64.b64decode(message["data"])])
        return bool(stored)

    async with running_worker(installation.worker_settings(engine={"ttft_s": 0.5})):
        await installation.ready()
        asking = asyncio.create_task(installation.complete(words, max_tokens=4))
        await until(has_seen)
        assert await asking
    assert len(zlib.compress(stored[0])) >= len(stored[0])  # it is noise


async def test_work_of_a_killed_worker_goes_on_elsewhere(installation: Installation) -> None:
    installation.queue.authority.issue(of_pool("demo"), "box7", lasts_s=3600)
    process = start_process(installation.worker_settings(name="box7", engine=SLOW))
    await until(lambda: process.said("ready\n"))
    await installation.ready()
    stream = await installation.gateway.client().completions.create(
        model=MODEL, prompt="hello", max_tokens=60, stream=True, extra_body={"ignore_eos": True}
    )
    text = ""
    async with running_worker(installation.worker_settings(engine=SLOW)):
        async for chunk in stream:
            text += chunk.choices[0].text
            if len(text) > 20:
                process.send_signal(signal.SIGKILL)
        whole = await installation.complete(max_tokens=60, extra_body={"ignore_eos": True})
    process.kill()
    assert text == whole


async def test_a_drained_worker_hands_back(installation: Installation) -> None:
    async with running_worker(installation.worker_settings(engine=SLOW, drain_s=0.1)) as stop:
        await installation.ready()
        stream = await installation.gateway.client().completions.create(
            model=MODEL, prompt="hello", max_tokens=60, stream=True, extra_body={"ignore_eos": True}
        )
        text = (await anext(stream)).choices[0].text
        async with running_worker(installation.worker_settings(instance="w2", engine=SLOW)):
            stop.request()
            async for chunk in stream:
                text += chunk.choices[0].text
            assert text == await installation.complete(max_tokens=60, extra_body={"ignore_eos": True})


@contextlib.asynccontextmanager
async def asked_all_the_time(ask: Callable[[], Any], at_once: int) -> AsyncIterator[list[Any]]:
    """Ask again and again, so many at a time, until left; yields the answers so far."""
    answers: list[Any] = []
    is_over = False

    async def keep_asking() -> None:
        while not is_over:
            answers.append(await ask())

    asking = [asyncio.create_task(keep_asking()) for _ in range(at_once)]
    yield answers
    is_over = True
    await asyncio.gather(*asking)


async def test_all_credentials_change_and_no_request_fails(installation: Installation) -> None:
    queue, parts = installation.queue, ("gateway", "ledger", of_pool("demo"))
    workers = [installation.worker_settings(instance=name, engine={"inter_token_s": 0.005}) for name in ("w1", "w2")]
    async with running_worker(workers[0]), running_worker(workers[1]):
        await installation.ready()
        ask = lambda: installation.complete(max_tokens=20, extra_body={"ignore_eos": True})  # noqa: E731
        expected = await ask()
        async with asked_all_the_time(ask, 4) as answers:
            for part in parts:
                queue.authority.issue(part)
                await until(progress(answers, 4))
                assert queue.authority.revoke(part, keep_newest=True) == 1
                queue.reload()
                await until(progress(answers, 8))
        assert set(answers) == {expected}
        await until(lambda: has_rows(installation, len(answers) + 1, len(answers) + 1))


def progress(answers: list[Any], more: int) -> Callable[[], bool]:
    """Return a condition: so many more have been answered."""
    wanted = len(answers) + more
    return lambda: len(answers) >= wanted


async def test_gateways_answer_the_ledger_and_workers(installation: Installation) -> None:
    queue = installation.queue
    ledger = await queue.connect("ledger")
    question = encode(OpenRequestsQuery(("unknown",)))
    reply = await ledger.request(subjects.open_requests_subject("g1"), question, timeout_s=HANGS_S)
    assert decode_still_open(reply.data).completion_tokens == {}
    machine = queue.authority.issue(of_pool("demo"), "box7", lasts_s=3600)
    worker = await queue.connect_worker(machine, "demo", "box7")
    oldest = await worker.request(subjects.oldest_job_subject(MODEL, "h0"), b"", timeout_s=HANGS_S)
    assert oldest.data == b""
    gateway = await queue.connect("gateway")
    await gateway.publish_durable(subjects.job_subject(MODEL, "h0"), b"a job", message_id="1")
    stored = await worker.request(subjects.oldest_job_subject(MODEL, "h0"), b"", timeout_s=HANGS_S)
    assert datetime.fromisoformat(stored.data.decode()).tzinfo is not None


async def test_commands_of_an_operator(installation: Installation, tmp_path: Path) -> None:
    config = tmp_path / "spillway.toml"
    config.write_text(
        f'data_dir = "{tmp_path / "data"}"\n[nats]\nurls = ["{installation.queue.server.url}"]\n'
        f'credentials = "{installation.queue.folder}"\n[database]\nurl = "{installation.database_url}"\n[models.m]\n'
    )
    copied = str(installation.queue.folder / "backup")
    for command in (
        ["dead-letters"],
        ["parked"],
        ["parked", "--replay"],
        ["limits", "recount"],
        ["queue", "backup", copied],
        ["status"],
    ):
        done = await asyncio.to_thread(CliRunner().invoke, app, [*command, "--config", str(config)])
        assert done.exit_code == 0, (command, done.output)
    assert re.search(r"queue    \S+: ok, waiting jobs: none\n", done.output), done.output
