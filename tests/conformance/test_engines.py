"""Duties of every engine that a worker can run (pool_worker/engines/base.py)."""

import asyncio
import contextlib
import json
import os
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from pydantic import TypeAdapter
from tokenizers import Tokenizer

from engine import LLMEngine
from engine.types import GenerationRequest, Refusal, ResumePoint, SamplingParams, SequenceOutput, SequenceTimings
from pool_worker import engines
from pool_worker.engines.base import Capacity, Engine, EngineDiedError
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
from protocol.artifacts import tokenizer_object_name
from tests.conformance.server_replay import AnyReplay, Replay, running_on_demand
from tests.conformance.vllm_replay import VllmReplay
from tests.unit.engine.tiny_models import byte_level_tokenizer, llama
from tests.waiting import HANGS_S

MAX_SEQUENCES = 4
MAX_MODEL_LEN = 200
PROMPT = tuple(range(40, 60))


@dataclass
class Answer:
    """All that a choice yielded, put together, and after how many tokens how much text was out."""

    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    logprobs: list[Any] = field(default_factory=list)
    chars_by_token: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    error: str | None = None
    vector: bytes | None = None

    def take(self, output: SequenceOutput) -> None:
        assert self.finish_reason is None, "output after the end"
        self.token_ids += output.token_ids
        self.text += output.text
        self.logprobs += output.logprobs or []
        self.chars_by_token += [len(self.text)] * len(output.token_ids)
        self.finish_reason, self.error, self.vector = output.finish_reason, output.error, output.vector

    def facts(self) -> tuple[list[int], str, str | None]:
        return self.token_ids, self.text, self.finish_reason


class Driver:
    """Iterates an engine's steps, as a worker does, and lets a test wait for what comes."""

    def __init__(self, engine: Engine, capacity: Capacity) -> None:
        self.engine = engine
        self.capacity = capacity
        self.answers: dict[tuple[str, int], Answer] = defaultdict(Answer)
        self.refusals: dict[str, Refusal] = {}
        self.timings: dict[str, list[SequenceTimings]] = defaultdict(list)
        self._changed = asyncio.Event()

    async def run(self) -> None:
        async for outputs in self.engine.steps():
            for output in outputs:
                self.answers[output.request_id, output.index].take(output)
                if output.timings is not None:
                    self.timings[output.request_id].append(output.timings)
                if isinstance(output, Refusal):
                    self.refusals[output.request_id] = output
            self._changed.set()

    async def wait(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(HANGS_S):
            while not condition():
                self._changed.clear()
                await self._changed.wait()

    async def wait_until(self, condition: Callable[[], bool]) -> None:
        """Wait for what no output of the engine tells."""
        async with asyncio.timeout(HANGS_S):
            while not condition():
                await asyncio.sleep(0.005)

    async def end_of(self, *ids: str, n: int = 1) -> list[Answer]:
        answers = [self.answers[id_, index] for id_ in ids for index in range(n)]
        await self.wait(lambda: all(answer.finish_reason for answer in answers))
        return answers

    @property
    def counts_tokens(self) -> bool:
        """Return whether the token ids are the model's own; a real server that answers in text may have others."""
        return not REAL_SERVER or not isinstance(self.engine, ServerEngine) or self.engine.counted_by == "engine"

    def submit(self, request: GenerationRequest) -> None:
        """Hand it in; without ``ignore_eos`` for a server that does not know it: replays never end by themselves."""
        if isinstance(self.engine, ServerEngine) and "ignore_eos" not in self.engine.honoured:
            request = replace(request, sampling=replace(request.sampling, ignore_eos=False))
        self.engine.submit(request)

    async def answer(self, request: GenerationRequest) -> Answer:
        self.submit(request)
        (answer,) = await self.end_of(request.request_id)
        return answer


def request(name: str = "r", prompt: tuple[int, ...] = PROMPT, **params: Any) -> GenerationRequest:
    resume = params.pop("resume", ())
    defaults = {"temperature": 0.0, "max_tokens": 24, "ignore_eos": True}
    return GenerationRequest(name, prompt, SamplingParams(**{**defaults, **params}), resume)


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("tiny-llama")
    llama().save_pretrained(folder)
    tokenizer = byte_level_tokenizer()
    tokenizer.chat_template = "{{ messages }}"
    tokenizer.save_pretrained(folder)
    return str(folder)


SILENT_ABOUT_LENGTH = frozenset({"sglang", "ollama", "triton"})


# The settings of a real server (tests/conformance/real_servers.py), as JSON, or nothing.
REAL_SERVER: dict[str, Any] = json.loads(os.environ.get("SPILLWAY_TEST_SERVER", "{}"))


@pytest.fixture(scope="module")
def replay_of() -> Iterator[Callable[[str], Replay]]:
    with running_on_demand() as replay_of:
        yield replay_of


ASKED = (*FORMATS, VllmReplay.kind)  # kinds of engines that ask others for tokens


def server_settings(replay: AnyReplay, tokenizer: str, **more: Any) -> TokenServerSettings:
    if isinstance(replay, VllmReplay):
        sizes = {"max_sequences": MAX_SEQUENCES, "max_model_len": MAX_MODEL_LEN}
        return VllmInProcessSettings(kind="vllm_inprocess", model=tokenizer, **{**sizes, **more})
    known = {
        "max_sequences": MAX_SEQUENCES,
        "model": "replay" if replay.kind == "triton" else None,
        "max_model_len": MAX_MODEL_LEN if replay.kind in SILENT_ABOUT_LENGTH else None,
        **more,
    }
    return ServerEngineSettings(kind=replay.kind, url=replay.url, tokenizer=tokenizer, **known)


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


@contextlib.asynccontextmanager
async def driving(settings: EngineSettings) -> AsyncIterator[Driver]:
    engine = engines.create(settings)
    driver = Driver(engine, await engine.start())
    running = asyncio.create_task(driver.run())
    try:
        yield driver
    finally:
        await engine.stop()
        async with asyncio.timeout(HANGS_S):
            await running  # `stop` ends the steps, whatever is still running


@pytest.fixture
async def driver(settings: EngineSettings) -> AsyncIterator[Driver]:
    async with driving(settings) as driver:
        yield driver


async def refuses(driver: Driver, **params: Any) -> bool:
    """Return whether the engine refuses what is asked for: by name, and never silently."""
    (name,) = params
    if not isinstance(driver.engine, ServerEngine) or name in driver.engine.honoured:
        return False
    refused = await driver.answer(request(f"with {name}", **params))
    assert (refused.finish_reason, driver.refusals[f"with {name}"].param) == ("error", name)
    return True


def made(driver: Driver, answer: Answer, wanted: int = 24) -> int:
    """Return its number of tokens; that of a real server that answers in text, as it counts."""
    if driver.counts_tokens:
        return len(answer.token_ids)
    assert len(answer.token_ids) <= wanted
    return wanted if answer.finish_reason == "length" else len(answer.token_ids)


def test_the_registry_makes_what_the_settings_name(settings: EngineSettings) -> None:
    assert engines.create(settings).name == settings.kind


async def test_it_says_what_fits(driver: Driver) -> None:
    assert driver.capacity.max_sequences == MAX_SEQUENCES
    assert driver.capacity.max_model_len == MAX_MODEL_LEN
    assert driver.capacity.max_kv_tokens >= MAX_MODEL_LEN


async def test_the_card_lets_a_gateway_count(driver: Driver) -> None:
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


async def test_no_token_at_all(driver: Driver) -> None:
    answer = await driver.answer(request(max_tokens=0))
    assert answer.facts() == ([], "", "length")


async def test_choices_are_numbered_and_end_each(driver: Driver) -> None:
    if await refuses(driver, seed=5):
        return
    driver.submit(request("r", n=3, temperature=1.0, seed=5))
    answers = await driver.end_of("r", n=3)
    assert [answer.finish_reason for answer in answers] == ["length"] * 3
    assert len({tuple(answer.token_ids) for answer in answers}) == 3


async def test_more_choices_than_fit_wait_for_each_other(driver: Driver) -> None:
    driver.submit(request("r", n=MAX_SEQUENCES + 2))
    answers = await driver.end_of("r", n=MAX_SEQUENCES + 2)
    assert all(made(driver, answer) == 24 for answer in answers)


async def test_a_stop_string_ends_the_text_before_it(driver: Driver) -> None:
    whole = await driver.answer(request("whole"))
    stop = whole.text[len(whole.text) // 2 :][:3]
    answer = await driver.answer(request("stopped", stop=(stop,)))
    assert answer.finish_reason == "stop"
    assert answer.text == whole.text[: whole.text.index(stop)]


async def test_what_ended_it_may_be_part_of_the_text(driver: Driver) -> None:
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


async def test_logprobs_come_with_every_token(driver: Driver) -> None:
    if await refuses(driver, logprobs=3):
        return
    answer = await driver.answer(request(logprobs=3))
    assert [entry.token_id for entry in answer.logprobs] == answer.token_ids
    for entry in answer.logprobs:
        assert entry.logprob <= 0
        assert len(entry.top) == 3
        assert [candidate[2] for candidate in entry.top] == sorted((c[2] for c in entry.top), reverse=True)
        # Greedy; but where end tokens are to be ignored, llama.cpp bans them instead.
        assert entry.token_id == next(
            one[0] for one in entry.top if REAL_SERVER.get("kind") != "llamacpp" or one[0] > 2
        )
        assert entry.bytes.decode(errors="replace") == entry.text


async def test_cancelling_is_idempotent_and_frees_the_place(driver: Driver) -> None:
    for number in range(MAX_SEQUENCES):
        driver.submit(request(f"long{number}", max_tokens=150))
    driver.submit(request("next", max_tokens=3))
    for number in range(MAX_SEQUENCES):
        await driver.wait(lambda id_=f"long{number}": driver.answers[id_, 0].token_ids)
        driver.engine.cancel(f"long{number}")
        driver.engine.cancel(f"long{number}")
    answers = await driver.end_of(*(f"long{number}" for number in range(MAX_SEQUENCES)))
    assert {answer.finish_reason for answer in answers} <= {"cancelled", "length"}
    assert "cancelled" in {answer.finish_reason for answer in answers}
    (answer,) = await driver.end_of("next")
    assert answer.finish_reason == "length"


async def test_what_waits_can_be_cancelled_too(driver: Driver) -> None:
    for number in range(MAX_SEQUENCES):
        driver.submit(request(f"long{number}", max_tokens=150))
    driver.submit(request("waiting", max_tokens=150))
    driver.engine.cancel("waiting")
    (answer,) = await driver.end_of("waiting")
    assert (answer.token_ids, answer.finish_reason) == ([], "cancelled")


async def test_cancelling_the_unknown_changes_nothing(driver: Driver) -> None:
    driver.engine.cancel("nobody")
    answer = await driver.answer(request())
    driver.engine.cancel("r")
    again = await driver.answer(request("again"))
    assert again.facts() == answer.facts()


@pytest.mark.parametrize("sampling", [{}, {"stop": (" zzz", "never")}, {"temperature": 1.0, "seed": 3}], ids=str)
async def test_resuming_anywhere_equals_the_undisturbed_answer(driver: Driver, sampling: dict[str, Any]) -> None:
    if "seed" in sampling and isinstance(driver.engine, ServerEngine):
        return  # a server draws again for what it continues: other tokens, none lost or repeated
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
async def test_a_refused_request_names_its_field_and_hurts_nobody(
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


async def test_stopping_without_ever_having_worked(settings: EngineSettings) -> None:
    async with driving(settings):
        pass


async def test_a_model_that_cannot_be_loaded_is_said_so() -> None:
    engine = engines.create(LocalEngineSettings(path="/no/such/model"))
    with pytest.raises(EngineDiedError, match="/no/such/model cannot be loaded"):
        await engine.start()
    await engine.stop()


async def test_an_error_in_a_step_loses_the_local_engine(model_folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken_step(_engine: LLMEngine) -> list[SequenceOutput]:
        raise ValueError("out of order")

    engine = engines.create(LocalEngineSettings(path=model_folder, kv_mib=8, threads=1))
    driver = Driver(engine, await engine.start())
    monkeypatch.setattr(LLMEngine, "step", broken_step)
    engine.submit(request())
    with pytest.raises(EngineDiedError, match="ValueError: out of order"):
        await driver.run()
    engine.cancel("r")  # a worker still cancels what it hands back
    await engine.stop()


async def test_the_scripted_engine_refuses_what_needs_probabilities(scripted: Driver) -> None:
    for name, value in (("prompt_logprobs", 0), ("allowed_token_ids", (5,)), ("bad_words", ("x",))):
        refused = await scripted.answer(request(name, **{name: value}))
        assert (refused.finish_reason, scripted.refusals[name].param) == ("error", name)


# --- the scripted engine's own faults ---------------------------------------------------------------------------------


@pytest.fixture
async def scripted() -> AsyncIterator[Driver]:
    async with driving(ScriptedEngineSettings(faults_from_prompt=True)) as driver:
        yield driver


def scripted_request(driver: Driver, prompt: str, name: str = "r", **params: Any) -> GenerationRequest:
    _, tokenizer_json = driver.engine.model_card("m")
    ids = Tokenizer.from_str(tokenizer_json.decode()).encode(prompt).ids
    return request(name, tuple(ids), **{"max_tokens": 100, "ignore_eos": False, **params})


async def test_a_wanted_length_is_kept(scripted: Driver) -> None:
    answer = await scripted.answer(scripted_request(scripted, "say [[tokens=32]]"))
    assert (len(answer.token_ids), answer.finish_reason) == (32, "stop")


async def test_a_failing_request_fails_alone_and_a_resumed_one_gets_past_it(scripted: Driver) -> None:
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
    engine.submit(scripted_request(driver, "[[crash after=2]]"))
    with pytest.raises(EngineDiedError, match="scripted crash"):
        await driver.run()
    assert len(driver.answers["r", 0].token_ids) == 2


async def test_prompts_cannot_ask_for_faults_where_that_is_off() -> None:
    async with driving(ScriptedEngineSettings()) as driver:
        answer = await driver.answer(scripted_request(driver, "[[crash after=2]] [[tokens=99]]"))
        assert answer.finish_reason == "stop"


async def test_its_statistics_are_what_it_did(driver: Driver) -> None:
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
    assert gaps == 9 * (MAX_SEQUENCES + 2) or (REAL_SERVER and gaps > 0)  # vLLM may tell of several tokens at once
    assert 0 < sum(stats.step_tokens.counts) <= stats.step_tokens.total


async def test_a_choice_tells_its_timings_with_its_first_token_and_at_its_end(driver: Driver) -> None:
    await driver.answer(request("whole", max_tokens=10))
    first, last = driver.timings["whole"]
    assert (first.queue_ms, first.prefill_ms, first.decode_ms) == (last.queue_ms, last.prefill_ms, 0.0)
    assert last.decode_ms > 0
    assert last.queue_ms >= 0
    assert last.prefill_ms >= 0


async def test_the_cancelled_tell_their_timings_too(driver: Driver) -> None:
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
