"""vLLM in the worker's own process: its start, refusals, crashes and silence."""

import asyncio
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pool_worker import engines
from pool_worker.engines.base import EngineDiedError
from pool_worker.settings import VllmInProcessSettings
from tests.conformance.driven_engine import Driver, driving, request
from tests.conformance.vllm_replay import KV_TOKENS, VLLMClientError, VLLMError, VllmReplay
from tests.unit.engine.tiny_models import byte_level_tokenizer
from tests.waiting import HANGS_S


@pytest.fixture
def vllm() -> Iterator[VllmReplay]:
    with VllmReplay().installed() as replay:
        yield replay


def settings(folder: Path, **more: Any) -> VllmInProcessSettings:
    byte_level_tokenizer().save_pretrained(folder)
    return VllmInProcessSettings(kind="vllm_inprocess", model=str(folder), **more)


def refuse() -> int:
    raise VLLMClientError("logprobs: more than 20")


def fail() -> int:
    raise VLLMError("EngineGenerateError")


async def test_a_worker_without_vllm_names_the_package_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "vllm", None)
    engine = engines.create(settings(tmp_path))
    with pytest.raises(EngineDiedError, match=r"engine\.kind: vllm_inprocess needs vLLM .*pip install vllm"):
        await engine.start()
    await engine.stop()


async def test_vllms_arguments_and_facts(tmp_path: Path, vllm: VllmReplay) -> None:
    async with driving(settings(tmp_path, max_sequences=8, engine_args={"dtype": "float32"})) as driver:
        assert driver.capacity.max_kv_tokens == KV_TOKENS
        assert driver.capacity.max_model_len == 200
    [reported] = vllm.started
    assert (reported.model, reported.max_num_seqs, reported.dtype, reported.max_model_len) == (
        str(tmp_path),
        8,
        "float32",
        None,
    )


async def test_an_unknown_vllm_argument_ends_the_start(tmp_path: Path, vllm: VllmReplay) -> None:
    engine = engines.create(settings(tmp_path, engine_args={"tensor_parallel": 2}))
    with pytest.raises(EngineDiedError, match=r"vLLM cannot serve .*tensor_parallel"):
        await engine.start()
    await engine.stop()


async def test_an_abandoned_start_leaves_nothing(
    tmp_path: Path, vllm: VllmReplay, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, go_on, ended = asyncio.Event(), asyncio.Event(), asyncio.Event()
    loop, start = asyncio.get_running_loop(), vllm._start

    def slow_start(arguments: Any) -> Any:
        loop.call_soon_threadsafe(begun.set)
        asyncio.run_coroutine_threadsafe(go_on.wait(), loop).result()
        engine = start(arguments)
        monkeypatch.setattr(engine, "shutdown", ended.set)
        return engine

    monkeypatch.setattr(sys.modules["vllm.v1.engine.async_llm"].AsyncLLM, "from_engine_args", slow_start)
    engine = engines.create(settings(tmp_path))
    starting = asyncio.create_task(engine.start())
    async with asyncio.timeout(HANGS_S):
        await begun.wait()
        starting.cancel()
        await asyncio.wait({starting})
        go_on.set()
        await ended.wait()
    await engine.stop()


async def test_vllms_refusals_are_the_clients_fault_and_failures_are_not(tmp_path: Path, vllm: VllmReplay) -> None:
    async with driving(settings(tmp_path)) as driver:
        vllm.faults.append(refuse)
        refused = await driver.answer(request("refused"))
        assert refused.finish_reason == "error"
        assert "more than 20" in (driver.refusals["refused"].error or "")
        vllm.faults.append(fail)
        failed = await driver.answer(request("failed"))
        assert (failed.finish_reason, "failed" in driver.refusals) == ("error", False)
        assert (await driver.answer(request("after"))).finish_reason == "length"


async def test_canceling_ends_vllms_work(tmp_path: Path, vllm: VllmReplay) -> None:
    async with driving(settings(tmp_path)) as driver:
        vllm.faults.append(lambda: 3)
        driver.engine.submit(request("left"))
        await driver.wait(lambda: len(driver.answers["left", 0].token_ids) == 3)
        driver.engine.cancel("left")
        (answer,) = await driver.end_of("left")
        assert answer.finish_reason == "cancelled"
        await driver.wait_until(lambda: vllm.streams == 0)


async def lost(folder: Path, **more: Any) -> tuple[Driver, asyncio.Task[None]]:
    engine = engines.create(settings(folder, **more))
    driver = Driver(engine, await engine.start())
    return driver, asyncio.create_task(driver.run())


async def test_a_dead_engine_core_loses_the_engine(tmp_path: Path, vllm: VllmReplay) -> None:
    driver, running = await lost(tmp_path)
    vllm.token_s = 0.01
    driver.engine.submit(request("r", max_tokens=150))
    await driver.wait(lambda: bool(driver.answers["r", 0].token_ids))
    vllm.is_healthy = False
    with pytest.raises(EngineDiedError, match="its engine core has died"):
        await running
    await driver.engine.stop()


async def test_an_engine_core_that_dies_idle_is_noticed(tmp_path: Path, vllm: VllmReplay) -> None:
    driver, running = await lost(tmp_path)
    vllm.is_healthy = False
    with pytest.raises(EngineDiedError, match="its engine core has died"):
        await running
    await driver.engine.stop()


async def test_a_long_prefill_is_not_a_lost_engine(tmp_path: Path, vllm: VllmReplay) -> None:
    driver, running = await lost(tmp_path, silence_s=0.2)
    vllm.faults.append(lambda: 0)
    driver.engine.submit(request("long"))
    (answer,) = await driver.end_of("long")
    assert "no token within 0.2 s (engine.silence_s; raise it" in (answer.error or "")
    assert not running.done()
    await driver.engine.stop()
    await running


async def test_an_engine_that_makes_no_tokens_is_lost(tmp_path: Path, vllm: VllmReplay) -> None:
    driver, running = await lost(tmp_path, silence_s=0.2)
    names: list[str] = []
    while not running.done():  # a busy machine may not make the first token in time, and that is no loss
        names.append(f"silent {len(names)}")
        vllm.faults.append(lambda: 3)
        driver.engine.submit(request(names[-1]))
        ended = asyncio.create_task(driver.end_of(names[-1]))
        await asyncio.wait({running, ended}, return_when=asyncio.FIRST_COMPLETED)
        ended.cancel()
    with pytest.raises(EngineDiedError, match="it made no tokens"):
        await running
    assert 0 < len(driver.answers[names[-1], 0].token_ids) <= 3
    await driver.engine.stop()
