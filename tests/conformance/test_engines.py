"""Requirements for every engine that a worker can run (pool_worker/engines/base.py)."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
from pydantic import TypeAdapter
from tokenizers import Tokenizer

from engine import LLMEngine
from engine.types import GenerationRequest, ResumePoint, SequenceOutput
from pool_worker import engines
from pool_worker.engines.base import EngineDiedError
from pool_worker.engines.formats import FORMATS
from pool_worker.engines.server import ServerEngine
from pool_worker.settings import (
    EngineSettings,
    LocalEngineSettings,
    ScriptedEngineSettings,
    ServerEngineSettings,
    TokenServerSettings,
    VllmInProcessSettings,
)
from protocol.nats.objects import tokenizer_object_name
from tests.conformance.driven_engine import (
    MAX_MODEL_LEN,
    MAX_SEQUENCES,
    PROMPT,
    REAL_SERVER,
    Answer,
    Driver,
    driving,
    made,
    refuses,
    request,
)
from tests.conformance.replay import AnyReplay
from tests.conformance.vllm_replay import VllmReplay
from tests.unit.engine.tiny_models import byte_level_tokenizer, llama
from tests.waiting import HANGS_S


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("tiny-llama")
    llama().save_pretrained(folder)
    tokenizer = byte_level_tokenizer()
    tokenizer.chat_template = "{{ messages }}"
    tokenizer.save_pretrained(folder)
    return str(folder)


SILENT_ABOUT_LENGTH = frozenset({"sglang", "ollama", "triton"})


ASKED = (*FORMATS, VllmReplay.kind)  # kinds of engines that get their tokens from others


def server_settings(replay: AnyReplay, tokenizer: str, **more: Any) -> TokenServerSettings:
    if isinstance(replay, VllmReplay):
        sizes = {"max_sequences": MAX_SEQUENCES, "max_model_len": MAX_MODEL_LEN}
        return VllmInProcessSettings(kind="vllm_inprocess", model=tokenizer, **{**sizes, **more})
    known = {
        "kind": replay.kind,
        "max_sequences": MAX_SEQUENCES,
        "model": "replay" if replay.kind == "triton" else None,
        "max_model_len": MAX_MODEL_LEN if replay.kind in SILENT_ABOUT_LENGTH else None,
        **more,
    }
    return ServerEngineSettings(url=replay.url, tokenizer=tokenizer, **known)


@pytest.fixture(params=["real"] if REAL_SERVER else ["scripted", "spillway", *ASKED])
def settings(request: pytest.FixtureRequest) -> EngineSettings:
    if request.param == "real":
        sizes = {"max_sequences": MAX_SEQUENCES, "max_model_len": MAX_MODEL_LEN}
        return TypeAdapter[EngineSettings](EngineSettings).validate_python({**sizes, **REAL_SERVER})
    if request.param not in ASKED:
        return _own_settings(request)
    replay: AnyReplay = request.getfixturevalue("replay_of")(request.param)
    replay.token_s = 0.003
    return server_settings(replay, request.getfixturevalue("model_folder"))


def _own_settings(request: pytest.FixtureRequest) -> EngineSettings:
    if request.param == "scripted":
        return ScriptedEngineSettings(
            max_sequences=MAX_SEQUENCES, max_model_len=MAX_MODEL_LEN, max_kv_tokens=1000, faults_from_prompt=True
        )
    folder = request.getfixturevalue("model_folder")
    return LocalEngineSettings(
        path=folder, max_sequences=MAX_SEQUENCES, max_model_len=MAX_MODEL_LEN, kv_mib=8, threads=1
    )


@pytest.fixture
async def driver(settings: EngineSettings) -> AsyncIterator[Driver]:
    async with driving(settings) as driver:
        yield driver


def test_the_registry_creates_the_configured_engine(settings: EngineSettings) -> None:
    assert engines.create(settings).name == settings.kind


async def test_an_engine_reports_its_capacity(driver: Driver) -> None:
    assert driver.capacity.max_sequences == MAX_SEQUENCES
    assert driver.capacity.max_model_len == MAX_MODEL_LEN
    assert driver.capacity.max_kv_tokens >= MAX_MODEL_LEN


async def test_the_card_lets_a_gateway_count_tokens(driver: Driver) -> None:
    card, tokenizer_json = driver.engine.model_card("some/model")
    tokenizer = Tokenizer.from_str(tokenizer_json.decode())
    assert tokenizer.decode(tokenizer.encode("so it goes, é", add_special_tokens=False).ids) == "so it goes, é"
    assert (card.model, card.context_length) == ("some/model", MAX_MODEL_LEN)
    assert card.tokenizer_object == tokenizer_object_name(tokenizer_json)
    assert card.chat_template
    assert "eos_token" in card.special_tokens


async def test_it_streams(driver: Driver) -> None:
    answer = await driver.answer(request())
    assert made(driver, answer) == 24
    assert answer.finish_reason == "length"
    _, tokenizer_json = driver.engine.model_card("m")
    decoded = Tokenizer.from_str(tokenizer_json.decode()).decode(answer.token_ids)
    assert answer.text == decoded
    assert len(set(answer.chars_by_token)) > 5


async def test_max_tokens(driver: Driver) -> None:
    for max_tokens in (1, 2, 7):
        answer = await driver.answer(request(f"r{max_tokens}", max_tokens=max_tokens))
        assert (made(driver, answer, max_tokens), answer.finish_reason) == (max_tokens, "length")


async def test_max_tokens_of_zero(driver: Driver) -> None:
    answer = await driver.answer(request(max_tokens=0))
    assert answer.facts() == ([], "", "length")


async def test_choices_are_numbered_and_each_ends(driver: Driver) -> None:
    if await refuses(driver, seed=5):
        return
    driver.submit(request("r", n=3, temperature=1.0, seed=5))
    answers = await driver.end_of("r", n=3)
    assert [answer.finish_reason for answer in answers] == ["length"] * 3
    assert len({tuple(answer.token_ids) for answer in answers}) == 3


async def test_choices_above_the_capacity_wait(driver: Driver) -> None:
    driver.submit(request("r", n=MAX_SEQUENCES + 2))
    answers = await driver.end_of("r", n=MAX_SEQUENCES + 2)
    assert all(made(driver, answer) == 24 for answer in answers)


async def test_a_stop_string_ends_the_text_before_it(driver: Driver) -> None:
    whole = await driver.answer(request("whole"))
    stop = whole.text[len(whole.text) // 2 :][:3]
    answer = await driver.answer(request("stopped", stop=(stop,)))
    assert answer.finish_reason == "stop"
    assert answer.text == whole.text[: whole.text.index(stop)]


class ContentAfter:
    """A text whose content begins after so many characters."""

    def __init__(self, chars: int) -> None:
        self.chars = chars
        self.read_chars = 0

    def push(self, text: str, *, is_last: bool) -> list[tuple[int, int]]:
        del is_last
        begin = max(self.read_chars, self.chars)
        self.read_chars += len(text)
        return [(begin, self.read_chars)] if begin < self.read_chars else []


async def test_a_stop_string_is_searched_in_the_content(driver: Driver) -> None:
    whole = await driver.answer(request("whole"))
    half = len(whole.text) // 2
    stop = whole.text[half - 3 : half]
    hidden = replace(request("hidden", stop=(stop,)), content_finder=partial(ContentAfter, len(whole.text)))
    assert (await driver.answer(hidden)).text == whole.text
    both = request("seen", stop=(stop, whole.text[half + 1 : half + 3]))
    answer = await driver.answer(replace(both, content_finder=partial(ContentAfter, half)))
    assert (answer.text, answer.finish_reason) == (whole.text[: half + 1], "stop")


async def test_the_stop_may_be_included_in_the_text(driver: Driver) -> None:
    whole = await driver.answer(request("whole"))
    stop = whole.text[len(whole.text) // 2 :][:3]
    answer = await driver.answer(request("stopped", stop=(stop,), include_stop_str_in_output=True))
    assert answer.text == whole.text[: whole.text.index(stop) + len(stop)]
    if await refuses(driver, stop_token_ids=(whole.token_ids[9],)):
        return
    by_token = await driver.answer(
        request("token", stop_token_ids=(whole.token_ids[9],), include_stop_str_in_output=True)
    )
    assert len(by_token.text) > len((await driver.answer(request("t", stop_token_ids=(whole.token_ids[9],)))).text)


async def test_a_stop_token_ends_the_choice(driver: Driver) -> None:
    whole = await driver.answer(request("whole"))
    stop = whole.token_ids[9]
    if await refuses(driver, stop_token_ids=(stop,)):
        return
    answer = await driver.answer(request("stopped", stop_token_ids=(stop,)))
    assert answer.finish_reason == "stop"
    assert answer.token_ids == whole.token_ids[: whole.token_ids.index(stop) + 1]


async def test_every_token_has_logprobs(driver: Driver) -> None:
    if await refuses(driver, logprobs=3):
        return
    answer = await driver.answer(request(logprobs=3))
    assert [entry.token_id for entry in answer.logprobs] == answer.token_ids
    for entry in answer.logprobs:
        assert entry.logprob <= 0
        assert len(entry.top) == 3
        assert [candidate[2] for candidate in entry.top] == sorted((c[2] for c in entry.top), reverse=True)
        # Greedy; llama.cpp bans end tokens instead of ignoring them.
        assert entry.token_id == next(
            one[0] for one in entry.top if REAL_SERVER.get("kind") != "llamacpp" or one[0] > 2
        )
        assert entry.utf8.decode(errors="replace") == entry.text


def has_begun(answer: Answer) -> bool:
    return bool(answer.token_ids)


async def test_canceling_is_idempotent_and_frees_the_slot(driver: Driver) -> None:
    for number in range(MAX_SEQUENCES):
        driver.submit(request(f"long{number}", max_tokens=150))
    driver.submit(request("next", max_tokens=3))
    for number in range(MAX_SEQUENCES):
        answer = driver.answers[f"long{number}", 0]
        await driver.wait(partial(has_begun, answer))
        driver.engine.cancel(f"long{number}")
        driver.engine.cancel(f"long{number}")
    answers = await driver.end_of(*(f"long{number}" for number in range(MAX_SEQUENCES)))
    assert {answer.finish_reason for answer in answers} <= {"cancelled", "length"}
    assert "cancelled" in {answer.finish_reason for answer in answers}
    (answer,) = await driver.end_of("next")
    assert answer.finish_reason == "length"


async def test_a_waiting_request_can_be_canceled(driver: Driver) -> None:
    for number in range(MAX_SEQUENCES):
        driver.submit(request(f"long{number}", max_tokens=150))
    driver.submit(request("waiting", max_tokens=150))
    driver.engine.cancel("waiting")
    (answer,) = await driver.end_of("waiting")
    assert (answer.token_ids, answer.finish_reason) == ([], "cancelled")


async def test_canceling_an_unknown_request_changes_nothing(driver: Driver) -> None:
    driver.engine.cancel("nobody")
    answer = await driver.answer(request())
    driver.engine.cancel("r")
    again = await driver.answer(request("again"))
    assert again.facts() == answer.facts()


@pytest.mark.parametrize("sampling", [{}, {"stop": (" zzz", "never")}, {"temperature": 1.0, "seed": 3}], ids=str)
async def test_resuming_anywhere_equals_the_undisturbed_answer(driver: Driver, sampling: dict[str, Any]) -> None:
    if "seed" in sampling and isinstance(driver.engine, ServerEngine):
        return  # a server draws again for a resumed answer: other tokens, none lost or repeated
    whole = await driver.answer(request("whole", **sampling))
    for done in (1, 5, 12, len(whole.token_ids) - 1):
        seen = whole.chars_by_token[done - 1]
        point = ResumePoint(0, tuple(whole.token_ids[:done]), seen)
        rest = await driver.answer(request(f"from{done}", resume=(point,), **sampling))
        assert whole.token_ids[:done] + rest.token_ids == whole.token_ids
        assert whole.text[:seen] + rest.text == whole.text
        assert rest.finish_reason == whole.finish_reason


async def test_a_complete_choice_ends_again_without_a_token(driver: Driver) -> None:
    driver.submit(request("whole", n=2))
    first, second = await driver.end_of("whole", n=2)
    resume = (
        ResumePoint(0, tuple(first.token_ids), len(first.text)),
        ResumePoint(1, tuple(second.token_ids[:4]), second.chars_by_token[3]),
    )
    driver.submit(request("rest", n=2, resume=resume))
    done, rest = await driver.end_of("rest", n=2)
    assert done.facts() == ([], "", first.finish_reason)
    assert second.token_ids[:4] + rest.token_ids == second.token_ids


async def test_together_equals_alone(driver: Driver) -> None:
    prompts = [tuple(range(start, start + 5 + start % 11)) for start in range(20, 80, 5)]
    alone = [await driver.answer(request(f"alone{i}", prompt)) for i, prompt in enumerate(prompts)]
    for i, prompt in enumerate(prompts):
        driver.submit(request(f"together{i}", prompt))
    together = await driver.end_of(*(f"together{i}" for i in range(len(prompts))))
    assert [answer.facts() for answer in together] == [answer.facts() for answer in alone]


@pytest.mark.parametrize(
    ("bad", "param"),
    [
        (request("bad", prompt=()), "prompt_ids"),
        (request("bad", max_tokens=MAX_MODEL_LEN), "max_tokens"),
        (request("bad", n=0), "n"),
        (request("bad", top_p=2.0), "top_p"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
async def test_a_refused_request_names_its_field_and_affects_no_other(
    driver: Driver, bad: GenerationRequest, param: str
) -> None:
    driver.submit(request("good"))
    driver.submit(bad)
    good, refused = await driver.end_of("good", "bad")
    assert (refused.finish_reason, driver.refusals["bad"].param) == ("error", param)
    assert refused.error
    assert made(driver, good) == 24


async def test_stopping_ends_with_work_in_progress(settings: EngineSettings) -> None:
    async with driving(settings) as driver:
        driver.submit(request(max_tokens=150))
        await driver.wait(lambda: driver.answers["r", 0].token_ids)


async def test_stopping_an_unused_engine(settings: EngineSettings) -> None:
    async with driving(settings):
        pass


async def test_a_model_that_cannot_be_loaded_is_reported() -> None:
    engine = engines.create(LocalEngineSettings(path="/no/such/model"))
    with pytest.raises(EngineDiedError, match="cannot load /no/such/model"):
        await engine.start()
    await engine.stop()


async def test_an_error_in_a_step_loses_the_local_engine(model_folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken_step(_engine: LLMEngine) -> list[SequenceOutput]:
        raise ValueError("out of order")

    engine = engines.create(LocalEngineSettings(path=model_folder, kv_mib=8, threads=1))
    driver = Driver(engine, await engine.start())
    monkeypatch.setattr(LLMEngine, "step", broken_step)
    driver.engine.submit(request())
    with pytest.raises(EngineDiedError, match="ValueError: out of order"):
        await driver.run()
    engine.cancel("r")  # a worker still cancels the jobs that it hands back
    await engine.stop()


async def test_statistics_match_the_work(driver: Driver) -> None:
    before = driver.engine.stats()
    assert (before.running, before.waiting, before.counters.generated_tokens) == (0, 0, 0)
    for number in range(MAX_SEQUENCES + 2):
        driver.submit(request(f"r{number}", (*PROMPT, 60 + number), max_tokens=10))
    await driver.end_of(*[f"r{number}" for number in range(MAX_SEQUENCES + 2)])
    stats = driver.engine.stats()
    assert (stats.running, stats.waiting, stats.kv_usage) == (0, 0, 0.0)
    assert stats.counters.generated_tokens == 10 * (MAX_SEQUENCES + 2)
    assert stats.counters.prompt_tokens == (len(PROMPT) + 1) * (MAX_SEQUENCES + 2)
    gaps = sum(stats.inter_token_s.counts)
    assert gaps == 9 * (MAX_SEQUENCES + 2) or (REAL_SERVER and gaps > 0)  # vLLM may report several tokens at once
    assert 0 < sum(stats.step_tokens.counts) <= stats.step_tokens.total


async def test_a_choice_reports_timings_with_its_first_token_and_at_its_end(driver: Driver) -> None:
    await driver.answer(request("whole", max_tokens=10))
    first, last = driver.timings["whole"]
    assert (first.queue_ms, first.prefill_ms, first.decode_ms) == (last.queue_ms, last.prefill_ms, 0.0)
    assert last.decode_ms > 0
    assert last.queue_ms >= 0
    assert last.prefill_ms >= 0


async def test_canceled_choices_report_their_timings(driver: Driver) -> None:
    for number in range(MAX_SEQUENCES + 1):
        driver.submit(request(f"r{number}", max_tokens=150))
    await driver.wait(lambda: all(driver.answers[f"r{number}", 0].token_ids for number in range(MAX_SEQUENCES)))
    waiting = f"r{MAX_SEQUENCES}"
    driver.engine.cancel(waiting)
    driver.engine.cancel("r0")
    await driver.end_of("r0", waiting)
    assert driver.timings["r0"][-1].decode_ms >= 0
    assert driver.timings[waiting][-1].queue_ms > 0
    assert driver.timings[waiting][-1].prefill_ms == 0
    for number in range(1, MAX_SEQUENCES):
        driver.engine.cancel(f"r{number}")


async def test_an_idle_engine_sleeps_and_wakes_for_the_next_request(
    model_folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    slept = asyncio.Event()
    loop, sleep = asyncio.get_running_loop(), LLMEngine.sleep

    def sleep_and_tell(engine: LLMEngine) -> None:
        sleep(engine)
        loop.call_soon_threadsafe(slept.set)

    monkeypatch.setattr(LLMEngine, "sleep", sleep_and_tell)
    settings = LocalEngineSettings(path=model_folder, kv_mib=8, threads=1, sleep_after_s=0.05)
    async with driving(settings) as driver, asyncio.timeout(HANGS_S):
        await slept.wait()
        first = await driver.answer(request("first"))
        slept.clear()
        await slept.wait()
        assert (await driver.answer(request("second"))).facts() == first.facts()
