"""The simulated engine: one token per step for each running choice, known in advance for every prompt.

Token ``place`` of choice ``index`` of a prompt is ``token_at(prompt, index, place)`` on every worker; its text is
``text_of`` it. The prompt's second token is the length of the answer.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

from engine.pooling.pooling_types import PoolingRequest
from engine.step_stats import SequenceClock, StepStats
from engine.types import EngineCounters, EngineStats, FinishReason, GenerationRequest, SequenceOutput
from pool_worker.engines.base import Capacity, EngineDiedError
from protocol.generation import SAMPLING_DEFAULTS
from protocol.job import PROTOCOL_VERSION, CountedBy, ModelCard

CONTEXT = 4096


def token_at(prompt: int, index: int, place: int) -> int:
    return (prompt * 7919 + index * 104_729 + place * 31 + place * place) % 50_000 + 10


def text_of(token_id: int) -> str:
    return f" {token_id}"


@dataclass(eq=False)
class _Choice:
    request_id: str
    prompt: int
    index: int
    made: int
    wanted: int
    finish: FinishReason
    clock: SequenceClock
    ready_s: float


@dataclass
class Pace:
    """The speed of an engine; may change while it runs."""

    first_token_s: float = 0.05
    token_s: float = 0.04


@dataclass
class Made:
    """The longest answer by prompt and choice that any engine of a simulation has generated."""

    tokens: dict[tuple[int, int], int] = field(default_factory=dict)

    def note(self, prompt: int, index: int, made: int) -> None:
        key = (prompt, index)
        if made > self.tokens.get(key, 0):
            self.tokens[key] = made

    def of(self, prompt: int) -> int:
        return sum(made for (one, _), made in self.tokens.items() if one == prompt)


class SimulatedEngine:
    """Implement ``pool_worker.engines.base.Engine``."""

    name = "simulated"
    takes: Literal["ids", "text"] = "ids"
    continues = True
    counted_by: CountedBy = "engine"
    honoured = SAMPLING_DEFAULTS
    facts_watch = None

    def __init__(self, max_sequences: int, pace: Pace, made: Made) -> None:
        self.pace = pace
        self.will_die = False
        self._made = made
        self._max_sequences = max_sequences
        self._waiting: list[_Choice] = []
        self.running: list[_Choice] = []
        self._ready: list[SequenceOutput] = []
        self._wake = asyncio.Event()
        self._stopped = False
        self._step_s = 0.0
        self._stats = StepStats()

    async def start(self) -> Capacity:
        return Capacity(self._max_sequences, 100_000, CONTEXT)

    def model_card(self, model: str) -> tuple[ModelCard, bytes]:
        card = ModelCard(
            v=PROTOCOL_VERSION, model=model, context_length=CONTEXT, tokenizer_object="tokenizer", chat_template=None
        )
        return card, b"{}"

    def submit(self, request: GenerationRequest | PoolingRequest) -> None:
        assert isinstance(request, GenerationRequest)
        points = {point.index: len(point.token_ids) for point in request.resume}
        prompt, length = request.prompt_ids[0], request.prompt_ids[1]
        limit = request.sampling.max_tokens
        wanted = min(length, limit)
        finish: FinishReason = "stop" if length <= limit else "length"
        for point in request.resume:
            token_ids = list(point.token_ids)
            expected = [token_at(prompt, point.index, place) for place in range(len(token_ids))]
            if token_ids != expected:
                raise AssertionError(
                    f"{request.request_id} resumes from tokens that no engine generated: {token_ids} not {expected}"
                )
        for index in range(request.sampling.n):
            made = points.get(index, 0)
            if made >= wanted:
                self._ready.append(SequenceOutput(request.request_id, index, [], "", finish_reason=finish))
                continue
            clock = SequenceClock(added_s=time.monotonic())
            self._waiting.append(_Choice(request.request_id, prompt, index, made, wanted, finish, clock, 0.0))
        self._wake.set()

    def cancel(self, request_id: str) -> None:
        for choices in (self.running, self._waiting):
            for choice in [one for one in choices if one.request_id == request_id]:
                choices.remove(choice)
                self._ready.append(
                    SequenceOutput(
                        request_id, choice.index, [], "", finish_reason="cancelled", timings=choice.clock.timings()
                    )
                )
        self._wake.set()

    async def steps(self) -> AsyncIterator[Sequence[SequenceOutput]]:
        while not self._stopped:
            self._admit()
            await self._wait()
            if self.will_die:
                raise EngineDiedError("the simulated engine died")
            outputs, self._ready = self._ready, []
            now_s = time.monotonic()
            if self.running and self._due_s() <= now_s:
                self._step_s = now_s
                outputs += self._step(now_s)
            if outputs:
                yield outputs

    def _admit(self) -> None:
        while self._waiting and len(self.running) < self._max_sequences:
            choice = self._waiting.pop(0)
            choice.clock.scheduled_s = time.monotonic()
            choice.ready_s = choice.clock.scheduled_s + self.pace.first_token_s
            self.running.append(choice)

    def _due_s(self) -> float:
        return max(self._step_s + self.pace.token_s, min(choice.ready_s for choice in self.running))

    async def _wait(self) -> None:
        if self._ready:
            await asyncio.sleep(0)
            return
        wait_s = self._due_s() - time.monotonic() if self.running else None
        if wait_s is not None and wait_s <= 0:
            return
        timer = None
        if wait_s is not None:
            timer = asyncio.get_running_loop().call_later(wait_s, self._wake.set)
        await self._wake.wait()
        self._wake.clear()
        if timer is not None:
            timer.cancel()

    def _step(self, now_s: float) -> list[SequenceOutput]:
        ready = [choice for choice in self.running if choice.ready_s <= now_s]
        self._stats.record_tokens([choice.clock for choice in ready], now_s)
        outputs = []
        for choice in ready:
            token_id = token_at(choice.prompt, choice.index, choice.made)
            choice.made += 1
            self._made.note(choice.prompt, choice.index, choice.made)
            reason = choice.finish if choice.made >= choice.wanted else None
            output = SequenceOutput(choice.request_id, choice.index, [token_id], text_of(token_id), None, reason)
            if reason is not None:
                output.timings = choice.clock.timings()
                self.running.remove(choice)
            outputs.append(output)
        return outputs

    def stats(self) -> EngineStats:
        return self._stats.snapshot(
            running=len(self.running), waiting=len(self._waiting), kv_usage=0.0, counters=EngineCounters()
        )

    async def stop(self) -> None:
        self._stopped = True
        self._wake.set()
