"""A running engine, and the answers of its requests."""

import asyncio
import contextlib
import json
import os
from collections import defaultdict
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec

from engine.types import GenerationRequest, Refusal, SequenceOutput, SequenceTimings
from pool_worker import engines
from pool_worker.engines.base import AnyEngine, Capacity, TokenEngine
from pool_worker.engines.server import ServerEngine
from pool_worker.settings import EngineSettings
from protocol.generation import SamplingParams
from tests.waiting import HANGS_S

MAX_SEQUENCES = 4
MAX_MODEL_LEN = 200
PROMPT = tuple(range(40, 60))
# The settings of a real server (tests/conformance/real_servers.py), as JSON, or nothing.
REAL_SERVER: dict[str, Any] = json.loads(os.environ.get("SPILLWAY_TEST_SERVER", "{}"))


@dataclass
class Answer:
    """A choice's combined output, and after how many tokens how much text was out."""

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
    """Iterates an engine's steps, as a worker does, and lets a test wait for outputs."""

    def __init__(self, engine: AnyEngine, capacity: Capacity) -> None:
        assert engine.takes != "messages"
        self.engine: TokenEngine = engine
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

    async def wait(self, condition: Callable[[], object]) -> None:
        async with asyncio.timeout(HANGS_S):
            while not condition():
                self._changed.clear()
                await self._changed.wait()

    async def wait_until(self, condition: Callable[[], bool]) -> None:
        """Wait for a condition that no output of the engine shows."""
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
        """Submit a request; without ``ignore_eos`` if the server lacks it: replays never end by themselves."""
        if isinstance(self.engine, ServerEngine) and "ignore_eos" not in self.engine.honoured:
            request = replace(request, sampling=msgspec.structs.replace(request.sampling, ignore_eos=False))
        self.engine.submit(request)

    async def answer(self, request: GenerationRequest) -> Answer:
        self.submit(request)
        (answer,) = await self.end_of(request.request_id)
        return answer


def request(name: str = "r", prompt: tuple[int, ...] = PROMPT, **params: Any) -> GenerationRequest:
    resume = params.pop("resume", ())
    defaults = {"temperature": 0.0, "max_tokens": 24, "ignore_eos": True}
    return GenerationRequest(name, prompt, SamplingParams(**{**defaults, **params}), resume)


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
            await running  # `stop` ends the steps, even with requests running


async def refuses(driver: Driver, **params: Any) -> bool:
    """Return whether the engine refuses a request by the field's name, and never silently."""
    (name,) = params
    if not isinstance(driver.engine, ServerEngine) or name in driver.engine.honoured:
        return False
    refused = await driver.answer(request(f"with {name}", **params))
    assert (refused.finish_reason, driver.refusals[f"with {name}"].param) == ("error", name)
    return True


def made(driver: Driver, answer: Answer, wanted: int = 24) -> int:
    """Return its number of tokens; for a real server that answers in text, by its count."""
    if driver.counts_tokens:
        return len(answer.token_ids)
    assert len(answer.token_ids) <= wanted
    return wanted if answer.finish_reason == "length" else len(answer.token_ids)
