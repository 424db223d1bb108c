"""Requirements for every engine that makes vectors (pool_worker/engines/base.py)."""

from array import array
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from engine.pooling.pooling_types import PoolingInput, PoolingRequest, PoolingTask
from engine.types import GenerationRequest
from pool_worker import engines
from pool_worker.engines.base import EngineDiedError
from pool_worker.settings import EngineSettings, LocalEngineSettings, ScriptedEngineSettings
from protocol.generation import SamplingParams
from tests.conformance.driven_engine import Driver, driving
from tests.unit.engine.pooled_models import HIDDEN, MAX_TOKENS, random_inputs, save_embedder, save_scorer

FLOAT_BYTES = 4


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {
        "embed": save_embedder(tmp_path_factory.mktemp("bert"), "bert"),
        "score": save_scorer(tmp_path_factory.mktemp("scorer"), "bert"),
    }


def settings_for(kind: str, task: PoolingTask, folders: dict[str, Path]) -> EngineSettings:
    if kind == "scripted":
        return ScriptedEngineSettings(task=task, dimensions=HIDDEN, max_model_len=MAX_TOKENS, max_sequences=4)
    return LocalEngineSettings(
        path=str(folders[task]), threads=1, max_sequences=4, max_batched_tokens=128, matryoshka=task == "embed"
    )


@pytest.fixture(params=["scripted", "spillway"])
async def embedder(request: pytest.FixtureRequest, folders: dict[str, Path]) -> AsyncIterator[Driver]:
    async with driving(settings_for(request.param, "embed", folders)) as driver:
        yield driver


@pytest.fixture(params=["scripted", "spillway"])
async def scorer(request: pytest.FixtureRequest, folders: dict[str, Path]) -> AsyncIterator[Driver]:
    async with driving(settings_for(request.param, "score", folders)) as driver:
        yield driver


def request(
    name: str, *inputs: list[int], task: PoolingTask = "embed", dimensions: int | None = None
) -> PoolingRequest:
    rows = [PoolingInput(index, ids, len(ids)) for index, ids in enumerate(inputs)]
    return PoolingRequest(name, task, rows, dimensions)


async def vectors(driver: Driver, one: PoolingRequest) -> list[list[float]]:
    driver.engine.submit(one)
    answers = await driver.end_of(one.request_id, n=len(one.inputs))
    assert {answer.finish_reason for answer in answers} == {"stop"}
    return [array("f", answer.vector or b"").tolist() for answer in answers]


async def test_the_card_describes_the_vectors(embedder: Driver, scorer: Driver) -> None:
    for driver, task, dimensions in ((embedder, "embed", HIDDEN), (scorer, "score", 1)):
        card, _ = driver.engine.model_card("m")
        assert card.pooling is not None
        assert (card.pooling.task, card.pooling.dimensions, card.context_length) == (task, dimensions, MAX_TOKENS)
        assert driver.capacity.max_kv_tokens >= MAX_TOKENS


async def test_each_inputs_vector_is_independent_of_the_others(embedder: Driver) -> None:
    inputs = random_inputs(20, seed=1)
    together = await vectors(embedder, request("together", *inputs))
    for index in (0, 7, 19):
        [alone] = await vectors(embedder, request(f"alone{index}", inputs[index]))
        assert alone == pytest.approx(together[index], abs=1e-5)
        assert sum(component * component for component in alone) == pytest.approx(1.0, abs=1e-5)


async def test_fewer_dimensions(embedder: Driver) -> None:
    ids = random_inputs(1)[0]
    [whole] = await vectors(embedder, request("whole", ids))
    [short] = await vectors(embedder, request("short", ids, dimensions=4))
    length = sum(component * component for component in whole[:4]) ** 0.5
    assert short == pytest.approx([component / length for component in whole[:4]], abs=1e-5)


async def test_scores_are_single_numbers(scorer: Driver) -> None:
    found = await vectors(scorer, request("r", *random_inputs(5), task="score"))
    assert all(len(vector) == 1 and 0 <= vector[0] <= 1 for vector in found)
    assert len({vector[0] for vector in found}) == 5


async def test_every_input_reports_its_timings(embedder: Driver) -> None:
    await vectors(embedder, request("r", *random_inputs(20, seed=1)))
    timings = embedder.timings["r"]
    assert len(timings) == 20
    assert all(one.queue_ms >= 0 and one.prefill_ms >= 0 and one.decode_ms == 0 for one in timings)
    assert max(one.prefill_ms for one in timings) > 0
    assert embedder.engine.stats().running == 0


async def test_waiting_inputs_can_be_canceled(embedder: Driver) -> None:
    embedder.engine.submit(request("left", *random_inputs(200, seed=2)))
    embedder.engine.cancel("left")
    embedder.engine.cancel("left")
    reasons = {answer.finish_reason for answer in await embedder.end_of("left", n=200)}
    assert "cancelled" in reasons
    assert reasons <= {"cancelled", "stop"}
    assert len(await vectors(embedder, request("next", [5, 6]))) == 1


@pytest.mark.parametrize(
    ("bad", "param"),
    [
        (request("bad", [5], []), "prompt_ids"),
        (request("bad", [5] * (MAX_TOKENS + 1)), "prompt_ids"),
        (request("bad", [5], dimensions=HIDDEN + 1), "dimensions"),
        (request("bad", [5], task="score"), "model"),
        (GenerationRequest("bad", [5], SamplingParams()), "model"),
    ],
    ids=str,
)
async def test_a_refused_request_names_its_field_and_affects_no_other(
    embedder: Driver, bad: PoolingRequest | GenerationRequest, param: str
) -> None:
    embedder.engine.submit(bad)
    assert len(await vectors(embedder, request("good", [5, 6]))) == 1
    await embedder.end_of("bad")
    assert embedder.refusals["bad"].param == param


@pytest.mark.parametrize(
    ("task", "given", "says"),
    [
        ("embed", {"task": "generate"}, "BertModel is for embed, not for generate"),
        ("embed", {"kv_mib": 64}, "kv_mib: has no effect on the task 'embed'"),
        ("score", {"pooling": "cls"}, "pooling: has no effect on the task 'score'"),
    ],
)
async def test_unsuitable_settings_are_named(
    folders: dict[str, Path], task: str, given: dict[str, Any], says: str
) -> None:
    engine = engines.create(LocalEngineSettings(path=str(folders[task]), threads=1, **given))
    with pytest.raises(EngineDiedError, match=says):
        await engine.start()
    await engine.stop()
