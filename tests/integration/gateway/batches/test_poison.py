"""Batches that cannot be indexed or run are given up and do not block other batches."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest

from db.accounts.keys import create_key
from db.engine import create_engine
from gateway.batches import run as batch_run
from gateway.batches.feeder import MAX_TAKES
from gateway.batches.files import Files
from gateway.batches.index import IndexFailed, NoRoomForIndex, make_index
from gateway.batches.indexer import IndexReport, IndexTask
from gateway.batches.storage.local import LocalStorage
from protocol import subjects
from tests.integration.gateway.batches.test_batches import QUICK, line, over, submit
from tests.integration.gateway.conftest import PEPPER, Share, Start
from tests.integration.gateway.scripted_worker import Attempt, answer_hello, hold_until_cancelled
from tests.integration.gateway.set_aside import is_set_aside
from tests.waiting import until

PATIENT = {**QUICK, "retry_s": 0.1}
SLOW = {**QUICK, "retry_s": 0.5, "grace_s": 0.1}


async def test_a_line_that_is_nested_too_deep_fails_its_batch_alone(share_gateway: Share) -> None:
    gateway = await share_gateway(batches=PATIENT)
    await gateway.add_worker()
    client = gateway.client()
    poisonous = await submit(client, ["[" * 1_500])
    assert (await over(client, await submit(client, [line("a")]))).status == "completed"
    failed = await over(client, poisonous)
    assert failed.status == "failed"
    assert failed.errors is not None
    assert [(error.code, error.line) for error in failed.errors.data or []] == [("invalid_json_line", 1)]


async def test_a_batch_that_crashes_the_indexer_is_given_up(
    share_gateway: Share, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, tries = make_index, 0

    async def dies(task: IndexTask, content: AsyncIterator[bytes]) -> IndexReport:
        nonlocal tries
        if task.endpoint == "/v1/completions":
            tries += 1
            raise IndexFailed("signal SIGSEGV")
        return await real(task, content)

    monkeypatch.setattr(batch_run, "make_index", dies)
    gateway = await share_gateway(batches=PATIENT)
    await gateway.add_worker()
    client = gateway.client()
    poisonous = await submit(client, ["{}"], endpoint="/v1/completions")
    assert (await over(client, await submit(client, [line("a")]))).status == "completed"
    failed = await over(client, poisonous)
    assert failed.errors is not None
    assert (failed.status, tries) == ("failed", 3)
    assert [error.code for error in failed.errors.data or []] == ["set_aside"]
    await until(lambda: is_set_aside(gateway.settings.database_url, "batch", poisonous.id, "IndexFailed"))


async def test_a_full_disk_does_not_fail_a_batch(share_gateway: Share, monkeypatch: pytest.MonkeyPatch) -> None:
    real, tries = make_index, 0

    async def has_no_room(task: IndexTask, content: AsyncIterator[bytes]) -> IndexReport:
        nonlocal tries
        tries += 1
        if tries <= 5:
            raise NoRoomForIndex("database or disk is full")
        return await real(task, content)

    monkeypatch.setattr(batch_run, "make_index", has_no_room)
    gateway = await share_gateway(batches=PATIENT)
    await gateway.add_worker()
    client = gateway.client()
    assert (await over(client, await submit(client, [line("a")]))).status == "completed"


async def test_a_batch_that_cannot_be_indexed_can_be_cancelled(
    share_gateway: Share, monkeypatch: pytest.MonkeyPatch
) -> None:
    began = asyncio.Event()

    async def fails_when_stopped(*_: Any) -> IndexReport:
        began.set()
        raise IndexFailed("again")

    monkeypatch.setattr(batch_run, "make_index", fails_when_stopped)
    gateway = await share_gateway(batches=SLOW)
    client = gateway.client()
    batch = await submit(client, [line("a")])
    await began.wait()
    await client.batches.cancel(batch.id)
    assert (await over(client, batch)).status == "cancelled"


async def test_a_batch_whose_index_is_not_ready_can_be_cancelled(
    share_gateway: Share, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Building an index can take half an hour."""
    began = asyncio.Event()

    async def takes_for_ever(*_: Any) -> IndexReport:
        began.set()
        await asyncio.Event().wait()
        raise AssertionError("unreachable")

    monkeypatch.setattr(batch_run, "make_index", takes_for_ever)
    client = (await share_gateway(batches=SLOW)).client()
    batch = await submit(client, [line("a")])
    await began.wait()
    await client.batches.cancel(batch.id)
    assert (await over(client, batch)).status == "cancelled"


async def test_batches_of_dying_gateways(start_gateway: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """The number of takes decides when to give up: dead gateways leave no reason.

    A batch without its input file once counted as empty. The file had been deleted by its team or in the storage while
    the batch was created.
    """
    begun = 0

    async def leaves(*_: Any) -> IndexReport:
        nonlocal begun
        begun += 1
        await asyncio.Event().wait()
        raise AssertionError("unreachable")

    with monkeypatch.context() as dying:
        dying.setattr(batch_run, "make_index", leaves)
        left = await start_gateway(batches=PATIENT)
        last_try, given_up, empty = [await submit(left.client(), [line("a")]) for _ in range(3)]
        await until(lambda: begun == 3)
        await left.end()
    engine = create_engine(left.settings.database_url)
    async with engine.begin() as connection:
        for batch, takes in ((last_try, MAX_TAKES - 1), (given_up, MAX_TAKES)):
            await connection.exec_driver_sql(f"UPDATE batches SET epoch = {takes} WHERE id = '{batch.id}'")
    await Files(engine, LocalStorage(left.settings.data_dir / "files")).delete(empty.input_file_id)
    await engine.dispose()
    gateway = await start_gateway(batches=PATIENT)
    await gateway.add_worker()
    client = gateway.client(api_key=left.key)
    assert (await over(client, last_try)).status == "completed"
    for batch, code in ((given_up, "set_aside"), (empty, "input_file_deleted")):
        failed = await over(client, batch)
        assert failed.errors is not None
        [error] = failed.errors.data or []
        assert (failed.status, error.code) == ("failed", code)
        assert ("every gateway that took it" in str(error.message)) == (batch is given_up)
    assert (await over(client, await submit(client, [line("a")]))).status == "completed"


async def test_a_tenant_with_many_batches_does_not_block_others(start_gateway: Start) -> None:
    gateway = await start_gateway(batches={**PATIENT, "max_running": 2})
    engine = create_engine(gateway.settings.database_url)
    _, key = await create_key(engine, "another tenant", PEPPER)
    await engine.dispose()
    await gateway.bus.publish(subjects.KEYS_CHANGED_SUBJECT, b"")

    async def answer(attempt: Attempt) -> None:
        await (hold_until_cancelled if len(attempt.prompt_ids) > 60 else answer_hello)(attempt)

    await gateway.add_worker(script=answer)
    greedy, other = gateway.client(), gateway.client(api_key=key)
    many = [await submit(greedy, [line(str(number), "long " * 30)]) for number in range(4)]

    async def fills_all() -> bool:
        states = [(await greedy.batches.retrieve(batch.id)).status for batch in many]
        return states.count("in_progress") >= 2

    async def is_known() -> bool:
        try:
            await other.models.list()
        except openai.AuthenticationError:
            return False
        return True

    await until(fills_all)
    await until(is_known)
    assert (await over(other, await submit(other, [line("a")]))).status == "completed"
    for batch in many:
        assert (await greedy.batches.retrieve(batch.id)).status in {"validating", "in_progress"}
