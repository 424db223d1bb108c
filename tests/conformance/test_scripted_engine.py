"""Faults of the scripted engine, and its refusals."""

from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest
from tokenizers import Tokenizer

from engine.types import GenerationRequest, ResumePoint
from pool_worker import engines
from pool_worker.engines.base import EngineDiedError
from pool_worker.settings import ScriptedEngineSettings
from tests.conformance.driven_engine import Driver, driving, request


@pytest.fixture
async def scripted() -> AsyncIterator[Driver]:
    async with driving(ScriptedEngineSettings(faults_from_prompt=True)) as driver:
        yield driver


def scripted_request(driver: Driver, prompt: str, name: str = "r", **params: Any) -> GenerationRequest:
    _, tokenizer_json = driver.engine.model_card("m")
    ids = Tokenizer.from_str(tokenizer_json.decode()).encode(prompt).ids
    return request(name, tuple(ids), **{"max_tokens": 100, "ignore_eos": False, **params})


async def test_a_requested_length_is_kept(scripted: Driver) -> None:
    answer = await scripted.answer(scripted_request(scripted, "say [[tokens=32]]"))
    assert (len(answer.token_ids), answer.finish_reason) == (32, "stop")


async def test_a_failing_request_fails_alone_and_succeeds_when_resumed(scripted: Driver) -> None:
    failing = scripted_request(scripted, "[[fail after=5]] [[tokens=9]]")
    scripted.submit(scripted_request(scripted, "hello", "good"))
    failed = await scripted.answer(failing)
    assert (failed.finish_reason, len(failed.token_ids)) == ("error", 5)
    (good,) = await scripted.end_of("good")
    assert good.finish_reason == "stop"
    point = ResumePoint(0, tuple(failed.token_ids), len(failed.text))
    resumed = await scripted.answer(replace(failing, request_id="resumed", resume=(point,)))
    assert (resumed.finish_reason, len(resumed.token_ids)) == ("stop", 4)


async def test_a_stalled_request_waits_for_its_cancellation(scripted: Driver) -> None:
    scripted.submit(scripted_request(scripted, "[[stall after=3]]"))
    await scripted.answer(scripted_request(scripted, "[[tokens=50]]", "other"))
    assert len(scripted.answers["r", 0].token_ids) == 3
    assert scripted.answers["r", 0].finish_reason is None
    scripted.engine.cancel("r")
    (answer,) = await scripted.end_of("r")
    assert answer.finish_reason == "cancelled"


async def test_a_crash_loses_the_engine() -> None:
    engine = engines.create(ScriptedEngineSettings(faults_from_prompt=True))
    driver = Driver(engine, await engine.start())
    driver.engine.submit(scripted_request(driver, "[[crash after=2]]"))
    with pytest.raises(EngineDiedError, match="scripted crash"):
        await driver.run()
    assert len(driver.answers["r", 0].token_ids) == 2


async def test_prompts_cannot_request_faults_if_disabled() -> None:
    async with driving(ScriptedEngineSettings()) as driver:
        answer = await driver.answer(scripted_request(driver, "[[crash after=2]] [[tokens=99]]"))
        assert answer.finish_reason == "stop"


async def test_the_scripted_engine_refuses_logprobs_and_grammars(scripted: Driver) -> None:
    asked: dict[str, Any] = {"prompt_logprobs": 0, "allowed_token_ids": (5,), "bad_words": ("x",)}
    for name, value in asked.items():
        refused = await scripted.answer(request(name, **{name: value}))
        assert (refused.finish_reason, scripted.refusals[name].param) == ("error", name)
